use std::ffi::OsString;

use clap::CommandFactory;
use clap::error::ErrorKind;

use super::*;
use crate::config::flags::FLAGS;

fn parsed(arguments: &[&str]) -> Result<Cli, clap::Error> {
    parse(arguments.iter().map(OsString::from))
}

fn run_args(arguments: &[&str]) -> RunArgs {
    match parsed(arguments).unwrap_or_else(|error| panic!("{arguments:?}: {error}")).command {
        Command::Run(args) => args,
        other => panic!("{arguments:?} is {other:?}"),
    }
}

fn texts(arguments: &[&str]) -> Vec<(&'static str, Vec<String>)> {
    run_args(arguments).flags.texts().map(|(name, texts)| (name, texts.to_vec())).collect()
}

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn flags_are_spelt_as_kubelets_take_them() {
    for (arguments, name, expected) in [
        (vec!["--max-pods=3"], "max-pods", vec!["3"]),
        (vec!["--max-pods", "3"], "max-pods", vec!["3"]),
        (vec!["--max_pods=3"], "max-pods", vec!["3"]),
        (vec!["--oom-score-adj", "-999"], "oom-score-adj", vec!["-999"]),
        (vec!["--fail-swap-on"], "fail-swap-on", vec!["true"]),
        (vec!["--fail-swap-on=false"], "fail-swap-on", vec!["false"]),
        (vec!["-v", "4"], "v", vec!["4"]),
        (vec!["-v=4"], "v", vec!["4"]),
        (vec!["-v4"], "v", vec!["4"]),
        (vec!["--v=4"], "v", vec!["4"]),
        (vec!["--log-format=json"], "logging-format", vec!["json"]),
        (vec!["--cluster-dns=10.0.0.1", "--cluster-dns=10.0.0.2"], "cluster-dns", vec!["10.0.0.1", "10.0.0.2"]),
        (vec!["--eviction-hard=memory.available<5%"], "eviction-hard", vec!["memory.available<5%"]),
        (vec!["--pod-cidr="], "pod-cidr", vec![""]),
        (vec!["--node-labels=a_b=c_d"], "node-labels", vec!["a_b=c_d"]),
    ] {
        let line: Vec<&str> = ["keblet", "run"].into_iter().chain(arguments).collect();
        assert_eq!(texts(&line), [(name, expected.into_iter().map(str::to_owned).collect())], "{line:?}");
    }
}

#[test]
fn called_as_kubelet_it_runs() {
    assert_eq!(texts(&["/usr/bin/kubelet", "--max-pods=3"]), texts(&["keblet", "run", "--max-pods=3"]));
    assert_eq!(run_args(&["kubelet", "--version"]).version.as_deref(), Some(version::KUBERNETES));
    assert!(parsed(&["keblet", "--max-pods=3"]).is_err());
}

#[test]
fn versions() {
    let version = |text: &str| run_args(&["keblet", "run", text]).version;
    assert_eq!(version("--version=raw").as_deref(), Some(version::KUBERNETES));
    assert_eq!(version("--version=v1.35.0").as_deref(), Some("v1.35.0"));
    assert_eq!(version("--version=false"), None);
    assert!(parsed(&["keblet", "run", "--version=new"]).is_err());
}

#[test]
fn what_is_unknown_is_refused() {
    let error = |arguments: &[&str]| parsed(arguments).expect_err("must be refused");
    let unknown = error(&["keblet", "run", "--max-pod=3"]);
    assert_eq!(unknown.kind(), ErrorKind::UnknownArgument);
    assert!(unknown.to_string().contains("--max-pods"), "suggests what is near: {unknown}");
    assert_eq!(error(&["keblet", "run", "extra"]).kind(), ErrorKind::UnknownArgument);
    assert_eq!(error(&["keblet", "run", "--fail-swap-on", "false"]).kind(), ErrorKind::UnknownArgument);
    let bad = error(&["keblet", "run", "--max-pods=many"]);
    assert_eq!(bad.kind(), ErrorKind::InvalidValue);
    assert!(bad.to_string().contains("--max-pods: \"many\" is not a whole number"), "{bad}");
}

#[test]
fn help_lists_every_flag() {
    let help = parsed(&["keblet", "run", "--help"]).expect_err("help is no command").to_string();
    for flag in FLAGS {
        assert!(help.contains(&format!("--{}", flag.name)), "--{} is missing", flag.name);
    }
    let short = parsed(&["keblet", "run", "-h"]).expect_err("help is no command").to_string();
    assert!(short.contains("--root-dir") && !short.contains("--max-pods"), "{short}");
}

fn answer(arguments: &[&str]) -> String {
    let mut out = Vec::new();
    match parsed(arguments).unwrap().command {
        Command::Config(command) => config::run(command, &mut out).unwrap(),
        Command::Version(args) => version::run(args, &mut out).unwrap(),
        Command::Completions(args) => docs::completions(&args, &mut out).unwrap(),
        Command::Man(args) => docs::man(&args, &mut out).unwrap(),
        other => panic!("{other:?} prints nothing here"),
    }
    String::from_utf8(out).unwrap()
}

#[test]
fn explain_shows_what_was_set_and_what_has_no_effect() {
    let text = answer(&[
        "keblet",
        "config",
        "explain",
        "--file-check-frequency=2m",
        "--contention-profiling=true",
        "--hairpin-mode=none",
        "--sync-frequency=30s",
        "--root-dir=/srv",
    ]);
    let line = |start: &str| {
        let line = text.lines().find(|line| line.trim_start().starts_with(start));
        line.unwrap_or_else(|| panic!("no {start} in\n{text}")).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(line("fileCheckFrequency"), "fileCheckFrequency 2m0s --file-check-frequency");
    assert_eq!(
        line("enableContentionProfiling"),
        "enableContentionProfiling true --contention-profiling not honoured yet"
    );
    assert_eq!(line("hairpinMode"), "hairpinMode none --hairpin-mode no effect, as in a kubelet");
    assert!(line("syncFrequency").starts_with("syncFrequency 30s --sync-frequency in part: how often objects"));
    assert_eq!(line("root-dir"), "root-dir /srv --root-dir");
    assert!(!text.contains("maxPods"), "defaults are left out");
    let notice = "enableContentionProfiling (--contention-profiling) is accepted but not honoured yet";
    assert!(text.contains(notice), "{text}");
    assert!(text.contains("syncFrequency (--sync-frequency) is honoured in part: how often"), "{text}");
    let json: serde_json::Value =
        serde_json::from_str(&answer(&["keblet", "config", "explain", "--all", "-o", "json"])).unwrap();
    let max_pods = json["fields"].as_array().unwrap().iter().find(|row| row["field"] == "maxPods").unwrap();
    assert_eq!((&max_pods["value"], &max_pods["origin"]), (&110.into(), &"default".into()));
    let honoured = |field: &str| {
        let row = json["fields"].as_array().unwrap().iter().find(|row| row["field"] == field).unwrap();
        (row["honoured"].as_bool().unwrap(), row["part"].is_string())
    };
    for partly in ["volumeStatsAggPeriod", "syncFrequency"] {
        assert_eq!(honoured(partly), (true, true), "{partly}");
    }
    assert_eq!((honoured("evictionHard"), honoured("imageMinimumGCAge")), ((true, false), (true, false)));
    assert_eq!(honoured("singleProcessOOMKill"), (true, false));
    assert_eq!(honoured("enableContentionProfiling"), (false, false));
    for used in [
        "maxOpenFiles",
        "oomScoreAdj",
        "enforceNodeAllocatable",
        "memorySwap.swapBehavior",
        "memoryReservationPolicy",
        "kubeletCgroups",
        "systemCgroups",
    ] {
        assert_eq!(honoured(used), (true, false), "{used}");
    }
}

#[test]
fn explain_shows_no_secrets() {
    let arguments =
        ["--manifest-url=https://me:secret@pods.test/all", "--manifest-url-header=Token:secret", "--output"];
    for format in ["text", "json"] {
        let text = answer(&[&["keblet", "config", "explain"][..], &arguments[..], &[format][..]].concat());
        assert!(text.contains("https://me:masked@pods.test/all") && text.contains("<masked>"), "{text}");
        assert!(!text.contains("secret"), "{text}");
    }
}

#[test]
fn check_accepts_and_notes() {
    let text = answer(&["keblet", "config", "check", "--ignore-host", "--volume-stats-agg-period=2m"]);
    assert!(
        text.contains("note: volumeStatsAggPeriod") && text.ends_with("The configuration is acceptable.\n"),
        "{text}"
    );
}

#[test]
fn check_names_what_keeps_the_agent_from_starting() {
    let refused = |arguments: &[&str]| {
        let line = ["keblet", "config", "check"].iter().chain(arguments).copied().collect::<Vec<_>>();
        let Command::Config(command) = parsed(&line).unwrap().command else { panic!("{line:?}") };
        config::run(command, &mut Vec::<u8>::new()).expect_err("not acceptable").to_string()
    };
    let reserved = refused(&["--system-reserved=memory=1Ei"]);
    assert!(reserved.contains("--system-reserved: systemReserved.memory: invalid Node Allocatable"), "{reserved}");
    let socket = refused(&["--ignore-host", "--image-service-endpoint=tcp://127.0.0.1:1"]);
    assert!(socket.contains("--image-service-endpoint: imageServiceEndpoint: "), "{socket}");
    let tls = refused(&["--ignore-host", "--tls-cipher-suites=TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384"]);
    assert!(tls.contains("--tls-cipher-suites: tlsCipherSuites: "), "{tls}");
}

#[test]
fn version_completions_and_manual() {
    assert_eq!(
        answer(&["keblet", "version"]),
        format!("keblet {}\nKubernetes {}\n", version::KEBLET, version::KUBERNETES)
    );
    for shell in ["bash", "zsh", "fish"] {
        assert!(answer(&["keblet", "completions", shell]).contains("container-runtime-endpoint"), "{shell}");
    }
    assert!(answer(&["keblet", "man"]).contains(".TH keblet 1"));
    let folder = tempfile::tempdir().unwrap();
    answer(&["keblet", "man", "--output", folder.path().to_str().unwrap()]);
    let page = std::fs::read_to_string(folder.path().join("keblet-run.1")).unwrap();
    assert!(page.contains("max\\-pods"), "the page of `run` lists its flags");
}
