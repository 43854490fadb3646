//! Rotation of container logs on a real runtime: a container that writes 10,000 lines a second, a follower, and an agent
//! that is killed in between. Every line is accounted for.

use std::fs;
use std::fs::File;
use std::io::Read as _;
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use flate2::read::GzDecoder;
use keblet_tests::standalone::NODE;
use keblet_tests::standalone::StandaloneNode;
use serde_json::Value;
use serde_json::json;

/// Lines that the container writes, 1000 at a time, ten times a second.
const LINES: u64 = 300_000;
/// Least number of rotations: one every three seconds.
const ROTATIONS: usize = 5;
/// Deadline of the follower.
const TIMEOUT: Duration = Duration::from_secs(180);

/// The manifest of a pod that writes the lines with the shell of this machine, after a while, and exits.
fn writer(node: &StandaloneNode) -> Value {
    let script = format!(
        "/usr/bin/sleep 5; i=0; while [ $i -lt {LINES} ]; do n=0; while [ $n -lt 1000 ]; do echo line $i; i=$((i+1)); n=$((n+1)); done; \
         /usr/bin/sleep 0.1; done"
    );
    let mut pod = node.pod("writer", &[]);
    let folders = ["/usr", "/lib", "/lib64"];
    let name = |folder: &str| folder.trim_start_matches('/').to_owned();
    let container = &mut pod["spec"]["containers"][0];
    container["command"] = json!(["/usr/bin/dash", "-c", script]);
    container["volumeMounts"] =
        folders.iter().map(|folder| json!({"name": name(folder), "mountPath": folder, "readOnly": true})).collect();
    pod["spec"]["volumes"] =
        folders.iter().map(|folder| json!({"name": name(folder), "hostPath": {"path": folder}})).collect();
    pod["spec"]["restartPolicy"] = json!("Never");
    pod
}

fn folder(node: &StandaloneNode) -> Result<PathBuf> {
    let uid = node.uid("writer").context("the pod is not served")?;
    Ok(node.layout.pod_logs.join(format!("default_writer-{NODE}_{uid}/main")))
}

/// The files of the log, oldest first.
fn files(node: &StandaloneNode) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder(node)?)?.flatten().map(|entry| entry.path()).collect();
    files.sort_by_key(|path| (path.ends_with("0.log"), path.clone()));
    Ok(files)
}

/// What the container wrote, by its log files.
fn output(node: &StandaloneNode) -> Result<String> {
    let mut output = String::new();
    for path in files(node)? {
        let (mut file, mut text) = (File::open(&path)?, String::new());
        match path.extension().is_some_and(|extension| extension == "gz") {
            true => GzDecoder::new(file).read_to_string(&mut text),
            false => file.read_to_string(&mut text),
        }
        .with_context(|| format!("reading {}", path.display()))?;
        for line in text.lines() {
            let mut fields = line.splitn(4, ' ').skip(2);
            let (tag, text) = fields.next().zip(fields.next()).with_context(|| format!("no log line: {line:?}"))?;
            output.push_str(text);
            output.push_str(if tag == "P" { "" } else { "\n" });
        }
    }
    Ok(output)
}

/// Checks that the output is all lines in order.
fn is_whole(output: &str) -> Result<()> {
    for (expected, line) in (0..).zip(output.lines()) {
        ensure!(line == format!("line {expected}"), "line {expected} is {line:?}");
    }
    ensure!(output.lines().count() as u64 == LINES, "{} lines", output.lines().count());
    Ok(())
}

/// Waits until the container runs; its log is empty then.
fn until_writing(node: &mut StandaloneNode) -> Result<()> {
    node.until_true("the container is reported as running", |node| {
        Ok(node.status("writer")["containerStatuses"][0]["state"]["running"].is_object())
    })
}

/// Follows the log until it ends.
async fn follow(url: String) -> Result<String> {
    // The server's certificate is self-signed.
    let client = reqwest::Client::builder().danger_accept_invalid_certs(true).build()?;
    let response = client.get(url).send().await?.error_for_status()?;
    Ok(tokio::time::timeout(TIMEOUT, response.text()).await.context("the log does not end")??)
}

fn rotating() -> Value {
    json!({"containerLogMaxSize": "256Ki", "containerLogMaxFiles": 100, "containerLogMonitorInterval": "3s"})
}

#[test]
#[ignore = "real runtime"]
fn no_line_is_lost_to_the_files_or_to_a_follower() -> Result<()> {
    let mut node = StandaloneNode::with(rotating())?;
    let config: Value = serde_json::from_slice(&fs::read(&node.layout.config)?)?;
    node.layout.write_manifest("writer", &writer(&node))?;
    node.start()?;
    until_writing(&mut node)?;
    let port = config["port"].as_u64().context("the main port is configured")?;
    // Pods may run before the certificate of the main port is made.
    node.until_true("the agent serves its main port", |_| Ok(TcpStream::connect(format!("127.0.0.1:{port}")).is_ok()))?;
    let url = format!("https://127.0.0.1:{port}/containerLogs/default/writer-{NODE}/main?follow=true");
    let followed = tokio::runtime::Runtime::new()?.block_on(follow(url))?;
    node.until_true("the container has exited", |node| Ok(node.status("writer")["phase"] == "Succeeded"))?;
    let files = files(&node)?;
    ensure!(files.len() > ROTATIONS, "{files:?}");
    let plain = files.iter().filter(|file| file.extension().is_none_or(|extension| extension != "gz")).count();
    ensure!(plain == 2, "all but the log and the newest rotated file are compressed: {files:?}");
    is_whole(&output(&node)?).context("in the files")?;
    is_whole(&followed).context("for the follower")?;
    ensure!(!node.log_contains(&["operation failed", "rotate_log"]), "a rotation failed");
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn an_agent_that_is_killed_again_and_again_costs_no_line() -> Result<()> {
    let mut node = StandaloneNode::with(rotating())?;
    node.layout.write_manifest("writer", &writer(&node))?;
    node.start()?;
    until_writing(&mut node)?;
    let mut rotated = 1;
    while node.status("writer")["phase"] != "Succeeded" {
        // At the very moment at which a rotation is seen to be in progress or done.
        let more = node.until("another rotation, or the end", |node| {
            let now = files(node)?.len();
            Ok((now > rotated || node.status("writer")["phase"] == "Succeeded").then_some(now))
        })?;
        rotated = more;
        node.kill_agent()?;
        node.start()?;
        node.until_true("the agent serves", |node| Ok(node.status("writer").is_object()))?;
    }
    node.until_true("nothing is left of interrupted rotations", |node| {
        let files = files(node)?;
        let is_left = |file: &PathBuf| {
            file.extension().is_some_and(|extension| extension == "tmp") || file.with_added_extension("gz").exists()
        };
        Ok(!files.iter().any(is_left))
    })?;
    is_whole(&output(&node)?)?;
    ensure!(files(&node)?.len() > 2, "{:?}", files(&node)?);
    node.stop()
}
