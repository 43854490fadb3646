//! Logs of services: from the journal, or from files with the service's name if the journal has no such service.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use futures_util::StreamExt as _;
use futures_util::stream;
use futures_util::stream::BoxStream;
use tokio::fs::File;
use tokio::io::AsyncRead;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe::Receiver;
use tokio::process::Child;
use tokio::process::Command;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::files::open_below;
use super::query::Options;
use crate::filesystem;

/// Time limit of a response.
pub(super) const TIME_LIMIT: Duration = Duration::from_secs(30);
/// Bytes per read.
const PIECE: usize = 16 * 1024;
/// Bytes of the list of units that are looked at: there is one for each session and container scope that the journal has seen.
const LONGEST_LIST: u64 = 4 << 20;

/// Sources of logs.
#[derive(Clone, Debug)]
pub(super) struct LogSources {
    pub(super) journalctl: PathBuf,
    pub(super) folder: PathBuf,
}

type Pieces = BoxStream<'static, Bytes>;

/// The logs of `services`, as bytes to send; ends after [`TIME_LIMIT`].
pub(super) async fn logs(
    places: &LogSources,
    services: Vec<String>,
    options: Options,
) -> impl Stream<Item = Bytes> + use<> {
    let end = Instant::now() + TIME_LIMIT;
    let known = tokio::time::timeout_at(end, units(&places.journalctl)).await;
    let known = known.ok().and_then(Result::ok).unwrap_or_default();
    let in_journal = |service: &String| known.contains(&format!("{service}.service"));
    let (in_journal, in_files): (Vec<String>, Vec<String>) = services.into_iter().partition(in_journal);
    let mut all: Vec<Pieces> = Vec::new();
    if !in_journal.is_empty() {
        let names: Vec<&str> = in_journal.iter().map(String::as_str).collect();
        all.push(journal(places, &options, &names, end).await);
    }
    if !in_files.is_empty() {
        all.push(files(places, &options, in_files).await);
    }
    stream::iter(all).flatten().take_until(Box::pin(tokio::time::sleep_until(end)))
}

/// The units in the journal.
///
/// # Errors
/// There is no journalctl, or its output cannot be read.
async fn units(journalctl: &Path) -> io::Result<String> {
    let mut command = Command::new(journalctl);
    command.args(["--field", "_SYSTEMD_UNIT"]).kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    // Waits until the program is read from its disk.
    let mut child = filesystem::blocking(move || command.spawn()).await?;
    let mut listed = Vec::new();
    if let Some(output) = child.stdout.take() {
        output.take(LONGEST_LIST).read_to_end(&mut listed).await?;
    }
    Ok(String::from_utf8_lossy(&listed).into_owned())
}

/// The output of journalctl, stdout and stderr, up to `end`.
async fn journal(places: &LogSources, options: &Options, services: &[&str], end: Instant) -> Pieces {
    let (program, arguments) = (places.journalctl.clone(), options.arguments(services));
    match filesystem::blocking(move || spawn(&program, arguments)).await {
        Ok((child, output)) => pieces(output, Some(killed_at(end, child))).boxed(),
        Err(error) => {
            tracing::warn!(%error, journalctl = %places.journalctl.display(), "cannot run journalctl");
            let silent = options.boot.is_some_and(|boot| boot != 0);
            stream::iter((!silent).then(|| Bytes::from_static(b"\nerror: journal output not available\n"))).boxed()
        }
    }
}

/// Starts a program; its output, stdout and stderr. Waits until it is read from its disk: blocks.
fn spawn(program: &Path, arguments: Vec<String>) -> io::Result<(Child, Receiver)> {
    let (read, write) = io::pipe()?;
    let errors = write.try_clone()?;
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(write)
        .stderr(errors)
        .kill_on_drop(true)
        .spawn()?;
    Ok((child, Receiver::from_owned_fd(OwnedFd::from(read))?))
}

/// Kills `child` at `end`, or when the result is dropped. A response that its client does not read is not polled, so that
/// its own time limit would not end the process.
fn killed_at(end: Instant, mut child: Child) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(async move {
        // A child that has not ended is killed by dropping it.
        let _ = tokio::time::timeout_at(end, child.wait()).await;
    }))
}

/// Reads until the end. `child` ends when the stream is dropped.
fn pieces(
    source: impl AsyncRead + Send + Unpin + 'static,
    child: Option<AbortOnDropHandle<()>>,
) -> impl Stream<Item = Bytes> + Send + 'static {
    stream::unfold((source, child), |(mut source, child)| async move {
        let mut piece = vec![0; PIECE];
        let read = source.read(&mut piece).await.unwrap_or(0);
        piece.truncate(read);
        (read > 0).then(|| (Bytes::from(piece), (source, child)))
    })
}

/// Logs of services that are not in the journal.
async fn files(places: &LogSources, options: &Options, services: Vec<String>) -> Pieces {
    if !options.is_empty() {
        let names = services.join(" ");
        let text = format!(
            "\noptions present and query resolved to log files for [{names}]\ntry without specifying options\n"
        );
        return stream::iter([Bytes::from(text)]).boxed();
    }
    let mut all: Vec<Pieces> = Vec::new();
    for service in services {
        all.push(match open(&places.folder, &service).await {
            Ok(file) => pieces(file, None).boxed(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                one_chunk(format!("\nlog not found for {service}\n"))
            }
            Err(error) => one_chunk(format!("\nerror getting log for {service}: {error}\n")),
        });
    }
    stream::iter(all).flatten().boxed()
}

fn one_chunk(text: String) -> Pieces {
    stream::iter([Bytes::from(text)]).boxed()
}

/// The first existing log file of a service.
async fn open(folder: &Path, service: &str) -> io::Result<File> {
    // Names of services have no slash, but they may be dots.
    if service.chars().all(|c| c == '.') {
        return Err(io::ErrorKind::NotFound.into());
    }
    for name in [service.to_owned(), format!("{service}.log"), format!("{service}/{service}.log")] {
        match open_below(folder, &name).await {
            Ok(Some(file)) => return Ok(file),
            Ok(None) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A journal that has `known.service` and prints the query.
    fn places(dir: &Path) -> LogSources {
        let script = dir.join("journalctl");
        let text = "#!/bin/sh\nif [ \"$1\" = --field ]; then echo known.service; else echo \"$@\"; echo failed >&2; exit 1; fi\n";
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        let folder = dir.join("log");
        std::fs::create_dir_all(folder.join("deep")).unwrap();
        std::fs::write(folder.join("plain.log"), "plain text\n").unwrap();
        std::fs::write(folder.join("deep/deep.log"), "deep text\n").unwrap();
        LogSources { journalctl: script, folder }
    }

    async fn text(places: &LogSources, services: &[&str], options: Options) -> String {
        let services = services.iter().map(|service| (*service).to_owned()).collect();
        let pieces: Vec<Bytes> = logs(places, services, options).await.collect().await;
        String::from_utf8(pieces.concat()).unwrap()
    }

    #[tokio::test]
    async fn journal_before_files() {
        let dir = tempfile::tempdir().unwrap();
        let places = places(dir.path());
        let output = text(&places, &["plain", "known", "deep", "none"], Options::default()).await;
        let journal = "--utc --no-pager --output=short-precise --unit=known\nfailed\n";
        assert_eq!(output, format!("{journal}plain text\ndeep text\n\nlog not found for none\n"));
        let lines = Options { lines: Some(1), ..Options::default() };
        let output = text(&places, &["plain", "deep"], lines).await;
        let expected =
            "\noptions present and query resolved to log files for [plain deep]\ntry without specifying options\n";
        assert_eq!(output, expected);
        assert_eq!(text(&places, &[".."], Options::default()).await, "\nlog not found for ..\n");
        std::fs::write(places.folder.join("plain"), "without a suffix\n").unwrap();
        std::fs::write(places.folder.join("deep.log"), "beside the folder\n").unwrap();
        let output = text(&places, &["plain", "deep"], Options::default()).await;
        assert_eq!(output, "without a suffix\nbeside the folder\n", "the first name that is a file");
    }

    #[tokio::test]
    async fn without_a_journal_there_are_files() {
        let dir = tempfile::tempdir().unwrap();
        let places = LogSources { journalctl: "/no/such/journalctl".into(), ..places(dir.path()) };
        assert_eq!(
            text(&places, &["plain", "known"], Options::default()).await,
            "plain text\n\nlog not found for known\n"
        );
    }

    #[tokio::test]
    async fn logs_of_services_do_not_lie_outside_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let places = places(dir.path());
        std::fs::write(dir.path().join("secret"), "secret").unwrap();
        for (link, target) in [("inside.log", "deep/deep.log"), ("outside.log", "../secret")] {
            std::os::unix::fs::symlink(target, places.folder.join(link)).unwrap();
        }
        let output = text(&places, &["inside", "outside"], Options::default()).await;
        assert_eq!(output, "deep text\n\nerror getting log for outside: path escapes from parent\n");
    }

    #[tokio::test]
    async fn a_pipe_in_place_of_a_log_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let places = places(dir.path());
        nix::unistd::mkfifo(&places.folder.join("pipe.log"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let output = tokio::time::timeout(TIME_LIMIT, text(&places, &["pipe"], Options::default()));
        let output = output.await.expect("no wait for a writer");
        assert_eq!(output, "\nerror getting log for pipe: not a regular file\n");
    }

    #[tokio::test]
    async fn a_journal_that_cannot_be_read_is_reported_on_a_line_of_its_own() {
        let places = LogSources { journalctl: "/no/such/journalctl".into(), folder: "/no/such/folder".into() };
        let end = Instant::now() + TIME_LIMIT;
        let pieces: Vec<Bytes> = journal(&places, &Options::default(), &["known"], end).await.collect().await;
        assert_eq!(pieces, ["\nerror: journal output not available\n"]);
        let earlier = Options { boot: Some(-1), ..Options::default() };
        assert_eq!(journal(&places, &earlier, &["known"], end).await.count().await, 0);
    }

    #[tokio::test]
    async fn a_journal_that_is_not_read_ends_at_the_time_limit() {
        let dir = tempfile::tempdir().unwrap();
        let mut places = places(dir.path());
        let script = "#!/bin/sh\n[ \"$1\" = --field ] && { echo known.service; exit; }\necho $$\nexec yes\n";
        places.journalctl = dir.path().join("endless");
        std::fs::write(&places.journalctl, script).unwrap();
        std::fs::set_permissions(&places.journalctl, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut pieces = std::pin::pin!(logs(&places, vec!["known".to_owned()], Options::default()).await);
        let first = String::from_utf8(pieces.next().await.expect("output").to_vec()).unwrap();
        let process = first.lines().next().expect("its pid").to_owned();
        // Gone, or a zombie.
        let has_ended = || {
            let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
            stat.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with('Z'))
        };
        assert!(!has_ended(), "it writes until it is killed");
        tokio::time::pause();
        tokio::time::advance(TIME_LIMIT + Duration::from_secs(1)).await;
        let began = std::time::Instant::now();
        while !has_ended() {
            assert!(began.elapsed() < TIME_LIMIT, "journalctl goes on while its output is not read");
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn an_endless_list_of_units_is_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let journalctl = dir.path().join("endless");
        std::fs::write(&journalctl, "#!/bin/sh\nexec yes known.service\n").unwrap();
        std::fs::set_permissions(&journalctl, std::fs::Permissions::from_mode(0o755)).unwrap();
        let listed = tokio::time::timeout(TIME_LIMIT, units(&journalctl)).await.expect("it is not read to its end");
        let listed = listed.unwrap();
        assert!(listed.starts_with("known.service\n") && listed.len() as u64 == LONGEST_LIST, "{}", listed.len());
    }

    #[tokio::test]
    async fn an_endless_journal_is_cut_off() {
        let dir = tempfile::tempdir().unwrap();
        let mut places = places(dir.path());
        std::fs::write(
            dir.path().join("endless"),
            "#!/bin/sh\n[ \"$1\" = --field ] && { echo known.service; exit; }\nexec yes\n",
        )
        .unwrap();
        places.journalctl = dir.path().join("endless");
        std::fs::set_permissions(&places.journalctl, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut pieces = std::pin::pin!(logs(&places, vec!["known".to_owned()], Options::default()).await);
        assert!(pieces.next().await.is_some());
        tokio::time::pause();
        tokio::time::advance(TIME_LIMIT + Duration::from_secs(1)).await;
        let rest = pieces.take(4).collect::<Vec<_>>().await;
        assert!(rest.len() < 4, "the deadline ends it");
    }
}
