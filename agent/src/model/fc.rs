//! Names of Fibre Channel volumes: World Wide Names of targets, World Wide Identifiers of disks. Pure.
//!
//! They become parts of paths: none may have a separator, lead elsewhere or be the place of another disk. Stricter than the
//! API server, which admits any text.

/// Name of the volume plugin.
pub const PLUGIN: &str = "kubernetes.io/fc";
/// What stands between the targets and the unit in the name of a place.
pub const UNIT: &str = "-lun-";
/// Longest name of a target, which has 16 digits.
const MAX_WWN: usize = 32;
/// Longest identifier of a disk.
const MAX_WWID: usize = 200;

/// Checks the World Wide Name of a target, as udev writes it after `0x`.
///
/// # Errors
/// What it has to be.
pub fn check_wwn(name: &str) -> Result<(), &'static str> {
    let is_valid = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
    match is_valid && name.len() <= MAX_WWN {
        true => Ok(()),
        false => Err("must be at most 32 letters and digits, without 0x"),
    }
}

/// Checks the World Wide Identifier of a disk, as in `/dev/disk/by-id/scsi-<identifier>`, with an underscore for a space.
///
/// # Errors
/// What it has to be.
pub fn check_wwid(identifier: &str) -> Result<(), &'static str> {
    // What udev writes into names of links.
    let fits = |c: char| c.is_ascii_alphanumeric() || "#+-.:=@_ ".contains(c);
    let begins_well = identifier.starts_with(|c: char| c.is_ascii_alphanumeric());
    if !begins_well || identifier.len() > MAX_WWID || !identifier.chars().all(fits) {
        return Err("must begin with a letter or digit and have at most 200 letters, digits, spaces and #+-.:=@_");
    }
    if is_partition(identifier) {
        return Err("must not be a partition");
    }
    match identifier.contains(UNIT) || identifier == "volumeDevices" {
        true => Err("must not be the name of other places of the plugin"),
        false => Ok(()),
    }
}

/// Whether udev would write this name for a partition. With it a pod would get a file system of the node itself.
fn is_partition(identifier: &str) -> bool {
    let number = identifier.rsplit_once("-part").map(|(_, number)| number);
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Checks the number of a logical unit.
///
/// # Errors
/// What it has to be.
pub fn check_lun(lun: i32) -> Result<u8, &'static str> {
    super::iscsi::check_lun(lun)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_targets() {
        for (name, is_valid) in [
            ("50060e801049cfd1", true),
            ("50060E801049CFD1", true),
            ("", false),
            ("../../etc", false),
            ("50:06:0e:80:10:49:cf:d1", false),
            ("50060e801049cfd1-lun-0", false),
            (".*", false),
            ("ä", false),
            (&"1".repeat(33), false),
        ] {
            assert_eq!(check_wwn(name).is_ok(), is_valid, "{name:?}");
        }
    }

    #[test]
    fn identifiers_of_disks() {
        for (identifier, is_valid) in [
            ("3600508b400105e210000900000490000", true),
            ("SVENDOR A_disk-1.2:3", true),
            ("", false),
            ("..", false),
            (".hidden", false),
            ("-a", false),
            ("a/b", false),
            ("a\nb", false),
            ("ä", false),
            ("50060e801049cfd1-lun-0", false),
            ("volumeDevices", false),
            ("3600508b400105e210000900000490000-part2", false),
            ("SVENDOR_disk-part", true),
            ("SVENDOR_disk-partA1", true),
            (&"1".repeat(201), false),
        ] {
            assert_eq!(check_wwid(identifier).is_ok(), is_valid, "{identifier:?}");
        }
    }
}
