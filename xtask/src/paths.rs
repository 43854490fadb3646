//! Paths in the repository.

use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;

use serde_json::Value;

use crate::system;

/// The root of the repository.
pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// The cargo that runs this program, so that child processes use the same `+toolchain`.
pub(crate) fn cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// Cargo's folder for build products. Cargo is queried, since its configuration may name any folder. In the virtual machine,
/// which has no cargo, a variable names it.
pub(crate) fn target() -> PathBuf {
    static TARGET: LazyLock<PathBuf> = LazyLock::new(|| {
        let other = || std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from);
        target_by(&mut metadata(&repository())).unwrap_or_else(other)
    });
    TARGET.clone()
}

/// The command by which cargo describes a workspace.
fn metadata(root: &Path) -> Command {
    let mut command = Command::new(cargo());
    command.args(["metadata", "--no-deps", "--format-version", "1"]).current_dir(root);
    command
}

fn target_by(metadata: &mut Command) -> Option<PathBuf> {
    let described: Value = serde_json::from_str(&system::output(metadata).ok()?).ok()?;
    described["target_directory"].as_str().map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_target_folder_is_that_of_cargos_configuration() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["src", ".cargo"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        for (name, text) in [
            ("Cargo.toml", "[package]\nname = \"a\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[workspace]\n"),
            ("src/lib.rs", ""),
            (".cargo/config.toml", "[build]\ntarget-dir = \"/data/build\"\n"),
        ] {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let mut command = metadata(folder.path());
        command.env_remove("CARGO_TARGET_DIR").env_remove("CARGO_BUILD_TARGET_DIR");
        assert_eq!(target_by(&mut command), Some("/data/build".into()));
        assert_eq!(target_by(&mut Command::new("/nowhere/cargo")), None);
    }
}
