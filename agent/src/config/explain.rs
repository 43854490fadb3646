//! The effective configuration as a table: value, where it was set, and whether keblet acts on it.
//!
//! Which fields are honoured is stated where they are defined ([`super::kubelet`], [`super::flags::FlagSettings`]); which
//! gates are, in their table.

use std::net::IpAddr;

use serde::Serialize;
use serde_json::Value;

use super::FlagSettings;
use super::feature_gates::Stage;
use super::flags::FlagValues;
use super::flags::Target;
use super::flags::find;
use super::keblet;
use super::keblet::KebletConfiguration;
use super::kubelet;
use super::kubelet::KubeletConfiguration;
use super::schema;
use super::schema::Described;
use super::schema::Field;
use super::settings::Origin;
use super::settings::Settings;
use super::settings::lookup;
use super::settings::to_json;

/// One effective value.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Which document it belongs to: the kind, or `flags`.
    pub document: &'static str,
    /// Path of the field there.
    pub field: String,
    /// Its value; `null` when nothing is set and nothing stands in for that.
    pub value: Value,
    /// Where it was set.
    pub origin: String,
    /// It was set somewhere.
    pub set: bool,
    /// keblet acts on it.
    pub honoured: bool,
    /// No kubelet of this version acts on it on Linux.
    pub obsolete: bool,
    /// The part of its meaning that keblet acts on, if not all of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<&'static str>,
    /// What it means.
    pub meaning: &'static str,
}

impl Row {
    /// How far it is honoured; `None` if it is without restriction.
    pub fn remark(&self) -> Option<String> {
        match (self.honoured, self.part) {
            (true, None) => None,
            (_, Some(part)) => Some(format!("in part: {part}")),
            (false, None) if self.obsolete => Some("no effect, as in a kubelet".to_owned()),
            (false, None) => Some("not honoured yet".to_owned()),
        }
    }
}

/// Every field of all three documents, without secrets.
pub fn rows(settings: &Settings) -> Vec<Row> {
    let origins = &settings.origins;
    let mut rows = Vec::new();
    let mut add = |document, fields, values: Value, origin: &dyn Fn(&str) -> Origin| {
        schema::walk(fields, &mut |path, field: &'static Field| {
            let origin = origin(path);
            rows.push(Row {
                document,
                field: path.to_owned(),
                value: at(&values, path).cloned().unwrap_or_default(),
                set: !matches!(origin, Origin::Default | Origin::LegacyDefault),
                origin: origin.to_string(),
                honoured: field.honoured,
                obsolete: field.obsolete,
                part: field.part,
                meaning: field.doc,
            });
        });
    };
    let kubelet = to_json(&settings.without_secrets()).into();
    add(kubelet::KIND, KubeletConfiguration::FIELDS, kubelet, &|path| written(&origins.kubelet, path));
    let keblet = to_json(&settings.keblet).into();
    add(keblet::KIND, KebletConfiguration::FIELDS, keblet, &|path| written(&origins.keblet, path));
    let flags = to_json(&settings.flags).into();
    add("flags", FlagSettings::FIELDS, flags, &|path| lookup(&origins.flags, path));
    rows
}

/// The origin of a field, or of the last thing set below it. A section that is written does not mean that each of its
/// fields is.
fn written(origins: &std::collections::BTreeMap<String, Origin>, path: &str) -> Origin {
    if let Some(origin) = origins.get(path) {
        return origin.clone();
    }
    let below = |known: &str| known.strip_prefix(path).is_some_and(|rest| rest.starts_with(['.', '[']));
    origins.iter().filter(|(known, _)| below(known)).map(|(_, origin)| origin.clone()).next_back().unwrap_or_default()
}

fn at<'a>(values: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(values, |value, name| value.get(name))
}

/// Warnings to log once at start.
pub(super) fn notices(settings: &Settings, flags: &FlagValues) -> Vec<String> {
    let mut notices = Vec::new();
    for flag in flags.deprecated() {
        notices.push(match flag.target {
            Target::Field(path) => {
                format!("flag --{} is deprecated; set {path} in the file of --config instead", flag.name)
            }
            Target::Own => format!("flag --{} is deprecated and will be removed", flag.name),
            Target::Nothing => format!("flag --{} is deprecated and has no effect", flag.name),
        });
    }
    for (gate, value) in settings.gates.named() {
        let spec = gate.spec();
        if matches!(spec.stage, Stage::GA | Stage::Deprecated) {
            notices.push(format!("feature gate {gate}={value} will be removed in a future release"));
        } else if gate.is_foreign() {
            // Clusters set one list for all components: only what differs from the default is said.
            if value != spec.default {
                notices.push(format!("feature gate {gate}={value} has no effect, as in a kubelet"));
            }
        } else if !gate.honours(value) {
            notices.push(format!("feature gate {gate}={value} is accepted but not honoured yet"));
        }
    }
    for (index, server) in settings.kubelet.cluster_dns.iter().enumerate() {
        if server.parse::<IpAddr>().is_err() {
            let field = format!("clusterDNS[{index}]");
            let origin = settings.origin(&field);
            notices.push(format!("{field} ({origin}) is ignored: {server:?} is not an IP address"));
        }
    }
    let ignored = |row: &Row| row.set && row.remark().is_some();
    for row in rows(settings).iter().filter(|row| ignored(row)) {
        let name = if find(&row.field).is_some_and(|flag| flag.target == Target::Own) && row.document == "flags" {
            format!("--{}", row.field)
        } else {
            format!("{} ({})", row.field, row.origin)
        };
        notices.push(match row.part {
            Some(part) => format!("{name} is honoured in part: {part}"),
            None if row.obsolete => format!("{name} is accepted and has no effect, as in a kubelet"),
            None => format!("{name} is accepted but not honoured yet"),
        });
    }
    notices
}
