//! Which calls of iscsiadm(8) attach and detach a disk, and what it reports. Pure.

use std::collections::BTreeMap;

use super::chap::Chap;
use super::chap::Login;
use super::disk::DiskRecord;
use crate::host_program::Call;
use crate::host_program::Ended;

/// Exit codes of iscsiadm(8): a session that was to be ended is not there; one that was to be made is; no record was found.
const NO_SESSION: i32 = 2;
const IS_PRESENT: i32 = 15;
const NO_RECORD: i32 = 21;
/// The setting of an interface that names its transport.
const TRANSPORT: &str = "iface.transport_name";

/// A call, and what a failure of it means.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) call: Call,
    pub(super) failure: Failure,
    /// Exit codes that are no failures.
    accepted: &'static [i32],
}

/// What a failed step means.
#[derive(Debug)]
pub(super) enum Failure {
    /// Nothing.
    Ignored,
    /// The portal cannot be used.
    Final,
    /// The portal cannot be used, and this undoes what was begun.
    Undone(Call),
}

impl Step {
    fn new(call: Call, failure: Failure) -> Self {
        Self { call, failure, accepted: &[] }
    }

    fn accepting(mut self, codes: &'static [i32]) -> Self {
        self.accepted = codes;
        self
    }

    /// True if the call has done its work.
    pub(super) fn is_done(&self, ended: &Ended) -> bool {
        ended.is_success() || ended.code.is_some_and(|code| self.accepted.contains(&code))
    }
}

fn iscsiadm(arguments: &[&str]) -> Call {
    Call::new("iscsiadm", arguments.iter().copied())
}

/// Shows the settings of an interface.
pub(super) fn show_interface(name: &str) -> Call {
    iscsiadm(&["-m", "iface", "-I", name, "-o", "show"])
}

/// Settings of an interface, as iscsiadm(8) shows them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Interface(BTreeMap<String, String>);

impl Interface {
    /// Reads lines as `iface.transport_name = tcp`. Settings without a value are left out; a transport without one is the
    /// kernel's, as upstream.
    pub(super) fn parse(text: &str) -> Self {
        let line = |line: &str| {
            let (name, value) = line.split_once('=')?;
            let (name, value) = (name.trim(), value.trim());
            let value = if (name, value) == (TRANSPORT, "<empty>") { "tcp" } else { value };
            let is_set = name.starts_with("iface.") && !value.is_empty() && value != "<empty>";
            is_set.then(|| (name.to_owned(), value.to_owned()))
        };
        Self(text.lines().filter_map(line).collect())
    }

    /// The transport, `tcp` for that of the kernel.
    pub(super) fn transport(&self) -> Option<&str> {
        self.0.get(TRANSPORT).map(String::as_str)
    }
}

/// Makes the disk's own interface: as the one that it was made from, with another name of the initiator.
pub(super) fn make_interface(record: &DiskRecord, base: &Interface) -> Vec<Step> {
    let own = record.interface.as_str();
    let new = Step::new(iscsiadm(&["-m", "iface", "-I", own, "-o", "new"]), Failure::Final);
    let mut steps = vec![new.accepting(&[IS_PRESENT])];
    let mut settings = base.0.clone();
    settings.remove("iface.iscsi_ifacename");
    settings.insert("iface.initiatorname".to_owned(), record.initiator.clone());
    steps.extend(settings.iter().map(|(name, value)| {
        let call = iscsiadm(&["-m", "iface", "-I", own, "-o", "update", "-n", name, "-v", value]);
        Step::new(call, Failure::Undone(remove_interface(record)))
    }));
    steps
}

/// Removes the disk's own interface.
pub(super) fn remove_interface(record: &DiskRecord) -> Call {
    iscsiadm(&["-m", "iface", "-I", &record.interface, "-o", "delete"])
}

/// Logs in to the target at a portal: discovers it there, and stores how the session is authenticated.
pub(super) fn log_in(record: &DiskRecord, portal: &str, chap: &Chap) -> Vec<Step> {
    let discovery = ["-m", "discoverydb", "-t", "sendtargets", "-p", portal, "-I", &record.interface];
    let on_discovery = |more: &[&str]| iscsiadm(&[&discovery[..], more].concat());
    let node = ["-m", "node", "-p", portal, "-T", &record.target, "-I", &record.interface];
    let on_node = |more: &[&str]| iscsiadm(&[&node[..], more].concat());
    let mut steps = vec![Step::new(on_discovery(&["-o", "new"]), Failure::Ignored)];
    steps.extend(credentials("discovery.sendtargets.auth", chap.discovery.as_ref(), on_discovery));
    steps.push(Step::new(on_discovery(&["--discover"]), Failure::Undone(on_discovery(&["-o", "delete"]))));
    // The unit is scanned for by itself: otherwise all units of the target would appear. Older versions cannot.
    let manual_scan = on_node(&["-o", "update", "-n", "node.session.scan", "-v", "manual"]);
    steps.push(Step::new(manual_scan, Failure::Ignored));
    steps.extend(credentials("node.session.auth", chap.session.as_ref(), on_node));
    let login = Step::new(on_node(&["--login"]), Failure::Undone(on_node(&["-o", "delete"])));
    steps.push(login.accepting(&[IS_PRESENT]));
    // A machine that boots would otherwise wait for a target that no pod uses.
    let manual_start = on_node(&["-o", "update", "-n", "node.startup", "-v", "manual"]);
    steps.push(Step::new(manual_start, Failure::Ignored));
    steps
}

fn credentials(prefix: &str, login: Option<&Login>, on: impl Fn(&[&str]) -> Call) -> Vec<Step> {
    let Some(login) = login else { return Vec::new() };
    let method = on(&["-o", "update", "-n", &format!("{prefix}.authmethod"), "-v", "CHAP"]);
    let values = login.values.iter().map(|(key, value)| {
        let call = on(&["-o", "update", "-n", key, "-v"]).with_secret(value.clone());
        Step::new(call, Failure::Final)
    });
    std::iter::once(Step::new(method, Failure::Final)).chain(values).collect()
}

/// Ends the sessions at these portals, with their records; and removes the disk's own interface if no other session has it.
pub(super) fn log_out(record: &DiskRecord, portals: &[&str]) -> Vec<Step> {
    let mut steps = Vec::new();
    for portal in portals {
        for end in [&["--logout"][..], &["-o", "delete"]] {
            let node = ["-m", "node", "-p", portal, "-T", &record.target, "-I", &record.interface];
            let step = Step::new(iscsiadm(&[&node[..], end].concat()), Failure::Final);
            steps.push(step.accepting(&[NO_SESSION, NO_RECORD]));
        }
    }
    if record.owns_interface() && portals.len() == record.portals.len() {
        let step = Step::new(remove_interface(record), Failure::Final);
        steps.push(step.accepting(&[NO_SESSION, NO_RECORD]));
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volumes::iscsi::disk::IscsiSource;

    const SHOWN: &str = "# BEGIN RECORD 2.1.8\niface.iscsi_ifacename = default\niface.net_ifacename = <empty>\n\
                         iface.hwaddress = <empty>\niface.transport_name = tcp\niface.initiatorname = <empty>\n\
                         iface.mtu = 0\n# END RECORD\n";

    fn record(initiator: &str) -> DiskRecord {
        let source = IscsiSource {
            target_portal: "192.0.2.1".to_owned(),
            portals: vec!["192.0.2.2:861".to_owned()],
            iqn: "iqn.2001-04.com.example:a".to_owned(),
            initiator: initiator.to_owned(),
            ..IscsiSource::default()
        };
        DiskRecord::of("v", &source).expect("valid")
    }

    fn texts(steps: &[Step]) -> Vec<String> {
        let text = |step: &Step| {
            let mark = match &step.failure {
                Failure::Ignored => "?".to_owned(),
                Failure::Final => String::new(),
                Failure::Undone(call) => format!(" | {}", call.arguments().join(" ")),
            };
            format!("{}{mark}", step.call).replace("iscsiadm ", "")
        };
        steps.iter().map(text).collect()
    }

    #[test]
    fn a_login_without_chap() {
        let node = "-m node -p 192.0.2.2:861 -T iqn.2001-04.com.example:a -I default";
        let found = "-m discoverydb -t sendtargets -p 192.0.2.2:861 -I default";
        let expected = [
            format!("{found} -o new?"),
            format!("{found} --discover | {found} -o delete"),
            format!("{node} -o update -n node.session.scan -v manual?"),
            format!("{node} --login | {node} -o delete"),
            format!("{node} -o update -n node.startup -v manual?"),
        ];
        assert_eq!(texts(&log_in(&record(""), "192.0.2.2:861", &Chap::default())), expected);
    }

    #[test]
    fn chap_is_set_before_it_is_needed_and_not_shown() {
        let login = |key: &'static str| Login { values: vec![(key, "-o hunter2".into())] };
        let chap = Chap {
            discovery: Some(login("discovery.sendtargets.auth.password")),
            session: Some(login("node.session.auth.password")),
        };
        let steps = log_in(&record(""), "192.0.2.1:3260", &chap);
        let shown = texts(&steps);
        let at = |text: &str| shown.iter().position(|step| step.contains(text)).unwrap_or_else(|| panic!("{shown:?}"));
        let order = [
            at("-o new"),
            at("-n discovery.sendtargets.auth.authmethod -v CHAP"),
            at("-n discovery.sendtargets.auth.password -v ***"),
            at("--discover"),
            at("-n node.session.auth.authmethod -v CHAP"),
            at("-n node.session.auth.password -v ***"),
            at("--login"),
        ];
        assert!(order.is_sorted(), "{shown:?}");
        assert!(!format!("{steps:?}").contains("hunter2"), "{steps:?}");
    }

    #[test]
    fn an_own_interface_is_the_named_one_with_another_initiator() {
        let base = Interface::parse(SHOWN);
        assert_eq!(base.transport(), Some("tcp"));
        assert_eq!(Interface::parse("iface.transport_name = <empty>\n").transport(), Some("tcp"));
        assert_eq!(Interface::parse("iface.transport_name =\niface.mtu = 0\n").transport(), None);
        let record = record("iqn.2001-04.com.example:me");
        let own = "-m iface -I 192.0.2.1:3260:v";
        let undo = format!("| {own} -o delete");
        let expected = [
            format!("{own} -o new"),
            format!("{own} -o update -n iface.initiatorname -v iqn.2001-04.com.example:me {undo}"),
            format!("{own} -o update -n iface.mtu -v 0 {undo}"),
            format!("{own} -o update -n iface.transport_name -v tcp {undo}"),
        ];
        let steps = make_interface(&record, &base);
        assert_eq!(texts(&steps), expected);
        let ended = |code| Ended { code: Some(code), ..Ended::default() };
        assert!(steps[0].is_done(&ended(15)) && steps[0].is_done(&ended(0)), "it is there from an earlier attempt");
        assert!(!steps[1].is_done(&ended(15)) && !steps[0].is_done(&Ended::default()));
    }

    #[test]
    fn a_logout_accepts_that_nothing_is_there_and_removes_the_own_interface_with_the_last_session() {
        let own = record("iqn.2001-04.com.example:me");
        let (first, second) = ("192.0.2.1:3260", "192.0.2.2:861");
        let steps = log_out(&own, &[first, second]);
        let node = |portal: &str| format!("-m node -p {portal} -T iqn.2001-04.com.example:a -I 192.0.2.1:3260:v");
        let expected = [
            format!("{} --logout", node(first)),
            format!("{} -o delete", node(first)),
            format!("{} --logout", node(second)),
            format!("{} -o delete", node(second)),
            "-m iface -I 192.0.2.1:3260:v -o delete".to_owned(),
        ];
        assert_eq!(texts(&steps), expected);
        let ended = |code| Ended { code: Some(code), ..Ended::default() };
        assert!([0, 2, 21].iter().all(|code| steps[0].is_done(&ended(*code))) && !steps[0].is_done(&ended(8)));
        assert_eq!(log_out(&own, &[first]).len(), 2, "the interface has another session");
        assert_eq!(log_out(&record(""), &[first, second]).len(), 4, "the interface is not the disk's own");
        assert!(log_out(&own, &[]).is_empty());
    }
}
