use super::*;
use crate::server::testing::ALL_ON;

fn main() -> Table {
    Table::main(&ALL_ON)
}

fn elsewhere(path: &str) -> Found {
    Found::Redirect(path.to_owned())
}

#[test]
fn unknown_paths() {
    for path in ["/", "/nope", "/configz/", "/healthz/x", "/metrics/", "/pods%2F", "/%70ods%2fx", "/debug/flags/v/"] {
        assert_eq!(main().find(path), Found::Unknown, "{path}");
    }
    for path in ["*", "", "/%zz"] {
        assert_eq!(main().find(path), Found::Malformed, "{path}");
    }
    assert_eq!(main().find(r"/\evil.example"), Found::Unknown, "canonical but for its encoding");
}

#[test]
fn redirects() {
    for (path, to) in [
        ("/logs", "/logs/"),
        ("/stats", "/stats/"),
        ("/runningpods", "/runningpods/"),
        ("/checkpoint", "/checkpoint/"),
        ("/debug/pprof", "/debug/pprof/"),
        ("//exec", "/exec"),
        ("/exec/../pods", "/pods"),
        ("/nope/../nope", "/nope"),
        ("//evil.example", "/evil.example"),
        (r"//\evil.example", "/%5Cevil.example"),
        (r"/.//\/\evil.example/", "/%5C/%5Cevil.example/"),
        ("//a%5cb%2Fc", "/a%5cb%2Fc"),
        ("//\"{|}^`<>\u{e4}", "/%22%7B%7C%7D%5E%60%3C%3E%C3%A4"),
        ("//-._~!$&'()*+,;=:@[]", "/-._~!$&'()*+,;=:@[]"),
    ] {
        assert_eq!(main().find(path), elsewhere(to), "{path}");
        assert!(!matches!(main().find(to), Found::Redirect(_)), "{path}: only once");
    }
}

#[test]
fn entries() {
    for (path, answer) in [
        ("/healthz", Endpoint::Healthz),
        ("/healthz/log", Endpoint::Check("log")),
        ("/%68ealthz", Endpoint::Healthz),
        ("/metrics/slis", Endpoint::SliMetrics),
        ("/configz", Endpoint::Configz),
        ("/debug/flags/v", Endpoint::DebugFlags),
    ] {
        assert!(matches!(main().find(path), Found::Handled(Handler::Any(found), _) if found == answer), "{path}");
    }
    for path in ["/pods", "/pods/x", "/exec/a", "/run", "/stats/x", "/exec/%2e%2e/pods", "/logs/a%2Fb"] {
        assert!(matches!(main().find(path), Found::Handled(Handler::Routes(_), _)), "{path}");
    }
    let Found::Handled(_, decoded) = main().find("/exec/%2e%2e/pods") else { panic!("must be found") };
    assert_eq!(decoded, "/exec/../pods");
}

#[test]
fn switched_off() {
    let off = |change: fn(&mut EnabledHandlers)| {
        let mut enabled = ALL_ON;
        change(&mut enabled);
        Table::main(&enabled)
    };
    let refuses = |table: &Table, path: &str, text: &str| {
        assert!(matches!(table.find(path), Found::Handled(Handler::Refused(found), _) if found == text), "{path}");
    };
    let debugging = off(|enabled| enabled.debugging = false);
    for table in [&debugging, &Table::read_only()] {
        for prefix in DEBUG_PREFIXES {
            refuses(table, &format!("{prefix}x"), "Debug endpoints are disabled.");
            assert_eq!(table.find(prefix.trim_end_matches('/')), elsewhere(prefix));
        }
        for path in ["/configz", "/checkpoint/a/b/c", "/flagz", "/statusz", "/debug/flags/v"] {
            assert_eq!(table.find(path), Found::Unknown, "{path}");
        }
    }
    refuses(&off(|enabled| enabled.system_logs = false), "/logs/x", "logs endpoint is disabled.");
    refuses(&off(|enabled| enabled.profiling = false), "/debug/pprof/x", "profiling endpoint is disabled.");
    refuses(&off(|enabled| enabled.debug_flags = false), "/debug/flags/v", "flags endpoint is disabled.");
    let gates = off(|enabled| (enabled.checkpoint, enabled.flagz, enabled.statusz) = (false, false, false));
    for path in ["/checkpoint/a/b/c", "/flagz", "/statusz"] {
        assert_eq!(gates.find(path), Found::Unknown, "{path}");
    }
}

#[test]
fn own_paths_of_statusz() {
    assert_eq!(main().own_paths(), ["/configz", "/debug", "/flagz", "/healthz", "/metrics"]);
    let refusing = Table::main(&EnabledHandlers { debug_flags: false, system_logs: false, ..ALL_ON });
    assert_eq!(refusing.own_paths(), ["/configz", "/debug", "/flagz", "/healthz", "/logs", "/metrics"]);
}
