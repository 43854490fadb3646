//! The script that the machine executes. Pure.

use std::ffi::OsStr;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use super::machine::Share;

/// A shell script that mounts the shared folders, sets the environment and leaves the command in the positional
/// parameters; see `guest/run`.
pub(super) fn script(
    shares: &[Share],
    environment: &[(String, OsString)],
    directory: &Path,
    command: &[OsString],
) -> Vec<u8> {
    let mut lines = Vec::new();
    for share in shares {
        let mode: &[u8] = if share.writable { b"rw" } else { b"ro" };
        lines.push([b"share ", share.tag.as_bytes(), b" ", &quoted(share.at.as_os_str()), b" ", mode].concat());
    }
    for (name, value) in environment {
        lines.push([b"export ", name.as_bytes(), b"=", &quoted(value)].concat());
    }
    lines.push([b"cd ", &quoted(directory.as_os_str())[..]].concat());
    let words: Vec<u8> = command.iter().flat_map(|word| [b" ".to_vec(), quoted(word)].concat()).collect();
    lines.push([b"set --", &words[..]].concat());
    lines.push(Vec::new());
    lines.join(&b'\n')
}

/// A word that the shell takes literally.
fn quoted(word: &OsStr) -> Vec<u8> {
    let escaped = word.as_bytes().iter().flat_map(|byte| match byte {
        b'\'' => br"'\''".to_vec(),
        other => vec![*other],
    });
    std::iter::once(b'\'').chain(escaped).chain(std::iter::once(b'\'')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_shell() {
        let words = ["a b", "it's", "$HOME `x` \\ \"", "", "-n"];
        let command: Vec<OsString> = ["printf", "<%s>"].into_iter().chain(words).map(OsString::from).collect();
        let script = script(&[], &[("WORD".to_owned(), "a 'b'".into())], Path::new("/"), &command);
        let script = [&script[..], b"\"$@\"; printf '%s' \"$WORD\""].concat();
        let output = std::process::Command::new("sh").arg("-c").arg(OsStr::from_bytes(&script)).output().unwrap();
        let expected: String = words.iter().map(|word| format!("<{word}>")).collect();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{expected}a 'b'"));
    }

    #[test]
    fn folders_are_mounted_as_they_are_shared() {
        let share = Share { tag: "s0".into(), folder: "/h".into(), at: "/a b".into(), writable: false };
        let text = script(&[share], &[], Path::new("/"), &["true".into()]);
        assert_eq!(String::from_utf8(text).unwrap(), "share s0 '/a b' ro\ncd '/'\nset -- 'true'\n");
    }
}
