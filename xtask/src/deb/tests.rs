//! The package as the tools of dpkg read it.

use std::os::unix::fs::symlink;
use std::process::Command;

use super::*;

/// Standard output of a tool; panics with its standard error if it fails.
fn output_of(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().expect(program);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

fn path(path: &Path) -> &str {
    path.to_str().expect("test folders have plain names")
}

/// A package of the agent that the tests build.
fn packaged(folder: &Path) -> PathBuf {
    if let Some(binary) = std::env::var_os("KEBLET_BIN") {
        return package(Path::new(&binary), folder, DEFAULT_MAINTAINER).expect("a package");
    }
    let built = Command::new(paths::cargo())
        .current_dir(paths::repository())
        .args(["build", "-q", "-p", "keblet", "--bin", "keblet"])
        .status();
    assert!(built.expect("cargo").success(), "keblet does not build");
    package(&paths::target().join("debug/keblet"), folder, DEFAULT_MAINTAINER).expect("a package")
}

#[test]
fn the_kubernetes_version_is_the_agents() {
    let source = repository("agent/src/model/version.rs").expect("the agent's version");
    let source = String::from_utf8(source).expect("text");
    assert!(source.contains(&format!("KUBERNETES: &str = \"v{KUBERNETES}\"")));
}

#[test]
fn a_package_has_a_maintainer_and_no_homepage() {
    for good in [DEFAULT_MAINTAINER, "A. Builder <a.builder@example.com>"] {
        assert_eq!(maintainer(good), Ok(good.to_owned()));
        let about = about("amd64", 1, good);
        assert!(about.contains(&format!("\nMaintainer: {good}\n")), "{about}");
        assert!(!about.contains("Homepage:"), "{about}");
    }
    let bad = ["", "A", "<a@b>", "A <a>", "A <a@>", "A <@b>", "A <a@b", "A <a@b@c>", "A\nB: c <a@b>", "A, B <a@b>"];
    for bad in bad {
        assert!(maintainer(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn only_programs_are_packaged() {
    let folder = tempfile::tempdir().expect("a folder");
    let error =
        package(&paths::repository().join("LICENSE"), folder.path(), DEFAULT_MAINTAINER).expect_err("not a program");
    assert!(format!("{error:#}").contains("LICENSE is not a program"), "{error:#}");
}

/// What the scripts request of systemd when dpkg calls them like this, one after the other.
fn asked(calls: &[(&str, &[&str])]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    fs::create_dir_all(folder.path().join("run/systemd/system")).expect("a folder");
    for tool in ["systemctl", "deb-systemd-helper"] {
        // It shows what it is asked for.
        symlink("/bin/echo", folder.path().join(tool)).expect("a link");
    }
    let (run, tools) = (format!("{}/run/", path(folder.path())), format!("{}:/usr/bin:/bin", path(folder.path())));
    let mut asked = String::new();
    for (name, arguments) in calls {
        let script = String::from_utf8(deploy(&format!("deb/{name}")).expect("a script")).expect("text");
        let script = script.replace("/run/", &run);
        let mut command = Command::new("sh");
        let output = command
            .args(["-c", script.as_str(), *name])
            .args(*arguments)
            .env("PATH", &tools)
            .output()
            .expect("a shell");
        assert!(output.status.success(), "{name} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        asked.push_str(&String::from_utf8_lossy(&output.stdout));
    }
    asked
}

#[test]
fn an_installation_starts_the_service() {
    let asked = asked(&[("preinst", &["install"]), ("postinst", &["configure", ""])]);
    assert_eq!(asked, "enable kubelet.service\ndaemon-reload\nrestart kubelet.service\n");
}

/// dpkg passes the version before in both cases.
#[test]
fn an_installation_after_a_removal_starts_the_service_and_an_upgrade_does_not() {
    let asked = asked(&[
        ("prerm", &["remove"]),
        ("postrm", &["remove"]),
        ("preinst", &["install", "0.1.0"]),
        ("postinst", &["configure", "0.1.0"]),
        ("prerm", &["upgrade", "0.2.0"]),
        ("preinst", &["upgrade", "0.1.0"]),
        ("postinst", &["configure", "0.1.0"]),
    ]);
    let removed = "stop kubelet.service\ndaemon-reload\n";
    let installed = "daemon-reload\nrestart kubelet.service\n";
    let upgraded = "daemon-reload\ntry-restart kubelet.service\n";
    assert_eq!(asked, format!("{removed}{installed}{upgraded}"));
}

#[test]
#[ignore = "runtime: installs a package into a folder, as root"]
fn dpkg_installs_it_in_place_of_kubelet() {
    let folder = tempfile::tempdir().expect("a folder");
    let package = packaged(folder.path());
    let about = output_of("dpkg-deb", &["-I", path(&package)]);
    for line in ["Package: keblet", "Provides: kubelet (= 1.36.3)", "Conflicts: kubelet", "Replaces: kubelet"] {
        assert!(about.contains(line), "{line} is missing: {about}");
    }
    let content = output_of("dpkg-deb", &["-c", path(&package)]);
    for line in ["-rwxr-xr-x root/root", "usr/bin/kubelet -> keblet", "usr/lib/systemd/system/kubelet.service\n"] {
        assert!(content.contains(line), "{line} is missing: {content}");
    }

    let root = folder.path().join("root");
    let database = root.join("var/lib/dpkg");
    for made in ["info", "updates"] {
        fs::create_dir_all(database.join(made)).expect("a folder");
    }
    fs::write(database.join("status"), installed_kubelet()).expect("a file");
    fs::create_dir_all(root.join("usr/bin")).expect("a folder");
    fs::write(root.join("usr/bin/kubelet"), "another agent").expect("a file");
    fs::write(database.join("info/kubelet.list"), "/.\n/usr\n/usr/bin\n/usr/bin/kubelet\n").expect("a file");
    // Maintainer scripts are not under test here, and the new root has no shell: `true` replaces it.
    fs::create_dir_all(root.join("bin")).expect("a folder");
    symlink("/bin/true", root.join("bin/sh")).expect("a link");
    let root = path(&root).to_owned();
    output_of(
        "dpkg",
        &[
            "--root",
            &root,
            "--force-depends",
            "--force-script-chrootless",
            "--auto-deconfigure",
            "--force-remove-reinstreq",
            "--force-conflicts",
            "--install",
            path(&package),
        ],
    );
    let status = output_of("dpkg", &["--root", &root, "--status", "keblet"]);
    assert!(status.contains("Status: install ok installed"), "{status}");
    let version = output_of(&format!("{root}/usr/bin/kubelet"), &["--version"]);
    assert_eq!(version, format!("Kubernetes v{KUBERNETES}\n"));
    let settings = fs::read_to_string(format!("{root}/etc/default/kubelet")).expect("the settings");
    assert!(settings.contains("KUBELET_EXTRA_ARGS="));
}

fn installed_kubelet() -> String {
    "Package: kubelet\nStatus: install ok installed\nPriority: optional\nSection: net\nMaintainer: nobody\n\
     Architecture: amd64\nVersion: 1.36.2-1.1\nDescription: the agent to be replaced\n\n"
        .to_owned()
}
