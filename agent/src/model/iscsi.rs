//! Names of iSCSI volumes: targets and initiators, portals, interfaces. Pure.
//!
//! They become arguments of programs and parts of paths: none may begin with a dash, have a separator or be longer than a file
//! name. Stricter than the API server, which admits a slash in the name of a target.

use std::net::Ipv6Addr;

/// Name of the volume plugin.
pub const PLUGIN: &str = "kubernetes.io/iscsi";
/// Port of a portal that states none.
const PORT: &str = "3260";
/// Longest name of a target or initiator (RFC 3720).
const MAX_NAME: usize = 223;
/// Longest name of an interface that iscsiadm(8) keeps.
const MAX_INTERFACE: usize = 64;
/// Longest name of a host.
const MAX_HOST: usize = 253;

/// Checks the name of a target or initiator: `iqn`, `eui` or `naa`.
///
/// # Errors
/// What it has to be.
pub fn check_name(name: &str) -> Result<(), &'static str> {
    let is_valid = match name.split_at_checked(4) {
        Some(("iqn.", rest)) => is_qualified(rest),
        Some(("eui.", rest)) => is_alphanumeric(rest) && rest.len() == 16,
        Some(("naa.", rest)) => is_alphanumeric(rest) && matches!(rest.len(), 16 | 32),
        _ => return Err("must begin with iqn., eui. or naa."),
    };
    match is_valid && name.len() <= MAX_NAME {
        true => Ok(()),
        false => Err("must be of the form iqn.yyyy-mm.reversed.domain:name, eui.<16 digits> or naa.<16 or 32 digits>"),
    }
}

/// What follows `iqn.`: `2001-04.com.example:storage.disk`.
fn is_qualified(rest: &str) -> bool {
    let Some((authority, unique)) = rest.split_once(':') else { return false };
    let Some((date, domain)) = authority.split_once('.') else { return false };
    let is_date = matches!(date.split_once('-'), Some((year, month))
        if is_number(year) && year.len() == 4 && is_number(month) && month.len() == 2);
    let in_domain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
    let in_name = |c: char| c.is_ascii_graphic() && !",;*&$|/\\\"'`<>()[]{}".contains(c);
    is_date && !domain.is_empty() && domain.chars().all(in_domain) && !unique.is_empty() && unique.chars().all(in_name)
}

fn is_number(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_alphanumeric(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// The portal with its port, 3260 unless it states one.
///
/// # Errors
/// What it has to be.
pub fn portal(text: &str) -> Result<String, &'static str> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, rest) = rest.split_once(']').ok_or("must end the brackets of an IPv6 address")?;
            address.parse::<Ipv6Addr>().map_err(|_| "must have an IPv6 address in the brackets")?;
            (&text[..address.len() + 2], rest.strip_prefix(':').or_else(|| rest.is_empty().then_some(PORT)))
        }
        None => {
            let (host, port) = text.split_once(':').unwrap_or((text, PORT));
            if !is_host(host) {
                return Err("must be an IP address or host name, with or without a port");
            }
            (host, Some(port))
        }
    };
    let is_port = |port: &&str| is_number(port) && port.parse::<u16>().is_ok_and(|port| port > 0);
    let port = port.filter(is_port).ok_or("must have a port from 1 to 65535, and an IPv6 address in brackets")?;
    Ok(format!("{host}:{port}"))
}

fn is_host(host: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    begins_well(host) && host.len() <= MAX_HOST && host.chars().all(fits)
}

/// Checks the name of an interface of the initiator.
///
/// # Errors
/// What it has to be.
pub fn check_interface(name: &str) -> Result<(), &'static str> {
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '[' | ']');
    match (begins_well(name) || name.starts_with('[')) && name.len() <= MAX_INTERFACE && name.chars().all(fits) {
        true => Ok(()),
        false => Err("must be a name of at most 64 letters, digits, dots, dashes, underscores, colons and brackets"),
    }
}

fn begins_well(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphanumeric())
}

/// Checks the number of a logical unit.
///
/// # Errors
/// What it has to be.
pub fn check_lun(lun: i32) -> Result<u8, &'static str> {
    u8::try_from(lun).map_err(|_| "must be between 0 and 255, inclusive")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_targets() {
        let long = format!("iqn.2001-04.com.example:{}", "a".repeat(MAX_NAME));
        for (name, is_valid) in [
            ("iqn.2001-04.com.example:storage.kube.sys1.xyz", true),
            ("iqn.2001-04.com.example.a-b:a_b+c@d:e", true),
            ("eui.0123456789ABCDEF", true),
            ("naa.62004567BA64678D0123456789ABCDEF", true),
            ("naa.52004567BA64678D", true),
            ("", false),
            ("-o", false),
            ("--login", false),
            ("disk", false),
            ("iqn.2001-04.com.example", false),
            ("iqn.2001-04.com.example:", false),
            ("iqn.01-04.com.example:a", false),
            ("iqn.20010-4.com.example:a", false),
            ("iqn.2001-04.:a", false),
            ("xiqn.2001-04.com.example:a", false),
            ("iqn.2001-04.com.example:../../../etc", false),
            ("iqn.2001-04.com.example:a b", false),
            ("iqn.2001-04.com.example:a\n", false),
            ("iqn.2001-04.com.example:a,b", false),
            ("iqn.2001-04.com.example:ä", false),
            ("iqn.2001-04.com/example:a", false),
            ("eui.0123456789ABCDE", false),
            ("eui.0123456789ABCDE/", false),
            ("naa.0123", false),
            ("iqä.2001-04.com.example:a", false),
            (&long, false),
        ] {
            assert_eq!(check_name(name).is_ok(), is_valid, "{name:?}");
        }
    }

    #[test]
    fn portals() {
        for (text, expected) in [
            ("192.0.2.1", Some("192.0.2.1:3260")),
            ("192.0.2.1:860", Some("192.0.2.1:860")),
            ("storage-1.example", Some("storage-1.example:3260")),
            ("[fd00::1]", Some("[fd00::1]:3260")),
            ("[fd00::1]:3261", Some("[fd00::1]:3261")),
            ("", None),
            ("-p", None),
            (":3260", None),
            ("192.0.2.1:", None),
            ("192.0.2.1:0", None),
            ("192.0.2.1:65536", None),
            ("192.0.2.1:+1", None),
            ("192.0.2.1:3260,1", None),
            ("192.0.2.1/../..", None),
            ("../x", None),
            ("192.0.2.1 -o delete", None),
            ("fd00::1", None),
            ("[fd00::1", None),
            ("[fd00::1]3260", None),
            ("[../x]:1", None),
            ("[fd00::1]:", None),
        ] {
            assert_eq!(portal(text).ok().as_deref(), expected, "{text:?}");
        }
    }

    #[test]
    fn interfaces_and_units() {
        for (name, is_valid) in [
            ("default", true),
            ("iser", true),
            ("bnx2i.00:10:18:00:00:01.ipv4.0", true),
            ("192.0.2.1:3260:pv", true),
            ("[fd00::1]:3260:pv", true),
            ("", false),
            ("-I", false),
            ("../default", false),
            ("a/b", false),
            ("a b", false),
            (".hidden", false),
        ] {
            assert_eq!(check_interface(name).is_ok(), is_valid, "{name:?}");
        }
        assert!(check_interface(&"a".repeat(MAX_INTERFACE + 1)).is_err());
        assert_eq!([0, 255].map(check_lun), [Ok(0), Ok(255)]);
        assert!([-1, 256].iter().all(|lun| check_lun(*lun).is_err()));
    }
}
