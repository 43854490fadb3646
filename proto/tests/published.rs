//! Compares every message, field, enum value and call with the published CRI.
//!
//! The published descriptor comes out of the Go module `k8s.io/cri-api`, which the small Go program in `published/`
//! fetches and prints. Without `go` or its module proxy the test is skipped.

use std::collections::BTreeMap;
use std::process::Command;
use std::process::Stdio;

use prost::Message;
use prost_types::DescriptorProto;
use prost_types::EnumDescriptorProto;
use prost_types::FieldDescriptorProto;
use prost_types::FileDescriptorSet;
use prost_types::MethodDescriptorProto;
use prost_types::field_descriptor_proto::Label;
use prost_types::field_descriptor_proto::Type;

/// Every fact of an interface by its full name: `runtime.v1.Mount.readonly` to `3 optional bool`.
type Descriptors = BTreeMap<String, String>;

#[test]
fn cri_matches_the_published_descriptors() {
    let published = match published() {
        Ok(set) => facts(&set),
        Err(why) => return keblet_skip::skip(&format!("cannot build the published CRI: {}", why.trim())),
    };
    let ours = FileDescriptorSet::decode(keblet_proto::cri::DESCRIPTORS).expect("own descriptors");
    let ours = facts(&ours);

    assert!(published.len() > 800, "only {} facts", published.len());
    let differences = differences(&ours, &published);
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

#[test]
fn descriptor_difference_is_detected() {
    let ours = FileDescriptorSet::decode(keblet_proto::cri::DESCRIPTORS).expect("own descriptors");
    let intact = facts(&ours);
    let faults: [fn(&mut DescriptorProto); 4] = [
        |m| m.field[0].number = Some(77),
        |m| m.field[0].r#type = Some(Type::Sint64 as i32),
        |m| m.field[0].label = Some(Label::Repeated as i32),
        |m| drop(m.field.pop()),
    ];
    for (index, fault) in faults.into_iter().enumerate() {
        let mut wrong = ours.clone();
        let message = wrong
            .file
            .iter_mut()
            .flat_map(|f| &mut f.message_type)
            .find(|m| m.name() == "ContainerMetadata")
            .expect("ContainerMetadata");
        fault(message);
        assert_eq!(differences(&facts(&wrong), &intact).len(), 1, "fault {index}");
    }
}

/// What `published/` prints, or why it does not.
fn published() -> Result<FileDescriptorSet, String> {
    let output = Command::new("go")
        .args(["run", "."])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/published"))
        .env("GOFLAGS", "-mod=readonly")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("go: {e}"))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(format!("go run: {}: {stderr}", output.status));
    }
    FileDescriptorSet::decode(output.stdout.as_slice()).map_err(|e| e.to_string())
}

fn differences(ours: &Descriptors, published: &Descriptors) -> Vec<String> {
    let missing = published
        .iter()
        .filter(|(name, _)| !ours.contains_key(*name))
        .map(|(name, fact)| format!("{name}: missing, published as {fact}"));
    let wrong = ours.iter().filter_map(|(name, fact)| match published.get(name) {
        Some(theirs) if theirs == fact => None,
        Some(theirs) => Some(format!("{name}: {fact}, published as {theirs}")),
        None => Some(format!("{name}: {fact}, not published")),
    });
    missing.chain(wrong).collect()
}

/// The files do not matter, only what they define: the published interface is one file, ours are several.
fn facts(set: &FileDescriptorSet) -> Descriptors {
    let mut facts = Descriptors::new();
    for file in &set.file {
        let package = file.package();
        facts.insert(package.to_owned(), format!("package, {}", file.syntax()));
        for message in &file.message_type {
            message_facts(&mut facts, package, message);
        }
        for enumeration in &file.enum_type {
            enum_facts(&mut facts, package, enumeration);
        }
        for service in &file.service {
            for method in &service.method {
                let name = format!("{package}.{}.{}", service.name(), method.name());
                facts.insert(name, method_fact(method));
            }
        }
    }
    facts
}

fn message_facts(facts: &mut Descriptors, scope: &str, message: &DescriptorProto) {
    let name = format!("{scope}.{}", message.name());
    let map = message.options.as_ref().is_some_and(|o| o.map_entry());
    let reserved: Vec<_> = message.reserved_range.iter().map(|r| r.start()..r.end()).collect();
    facts.insert(name.clone(), format!("message, map entry {map}, reserved {reserved:?} {:?}", message.reserved_name));
    for field in &message.field {
        facts.insert(format!("{name}.{}", field.name()), field_fact(message, field));
    }
    for nested in &message.nested_type {
        message_facts(facts, &name, nested);
    }
    for enumeration in &message.enum_type {
        enum_facts(facts, &name, enumeration);
    }
}

fn field_fact(message: &DescriptorProto, field: &FieldDescriptorProto) -> String {
    let options = field.options.as_ref();
    let oneof = field.oneof_index.map(|index| message.oneof_decl[index as usize].name().to_owned());
    format!(
        "{} {:?} {:?} {} {} oneof {oneof:?} packed {:?} deprecated {}",
        field.number(),
        field.label(),
        field.r#type(),
        field.type_name(),
        field.json_name(),
        options.and_then(|o| o.packed),
        options.is_some_and(|o| o.deprecated()),
    )
}

fn enum_facts(facts: &mut Descriptors, scope: &str, enumeration: &EnumDescriptorProto) {
    let name = format!("{scope}.{}", enumeration.name());
    facts.insert(name.clone(), "enum".to_owned());
    for value in &enumeration.value {
        facts.insert(format!("{name}.{}", value.name()), value.number().to_string());
    }
}

fn method_fact(method: &MethodDescriptorProto) -> String {
    format!(
        "rpc ({}, stream {}) returns ({}, stream {})",
        method.input_type(),
        method.client_streaming(),
        method.output_type(),
        method.server_streaming(),
    )
}
