//! The form in which configuration documents are written down: one row per field.
//!
//! A row has a field's name in the document, its type and default, whether the API distinguishes "zero" from "absent",
//! whether keblet acts on it yet, or no kubelet does, and what it means. Struct, default, `config explain` and the list of
//! settings that are accepted but not honoured all come from the same row, so they cannot disagree. Nothing is read or
//! checked here.

/// Whether zero in a document is a value of this field, or the same as absence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// An optional field: zero is a value of its own, only absence brings the default.
    Pointer,
    /// A plain field: zero counts as not written, so the default takes its place.
    Value,
    /// A section with fields of its own.
    Nested,
}

/// One field of a configuration document.
#[derive(Debug)]
pub struct Field {
    /// Name in the document.
    pub name: &'static str,
    /// Whether zero differs from absent.
    pub presence: Presence,
    /// Whether keblet acts on it. A section is honoured when any of its fields is.
    pub honoured: bool,
    /// Whether no kubelet of this version acts on it on Linux either.
    pub obsolete: bool,
    /// If it acts on a part of its meaning only: on which.
    pub part: Option<&'static str>,
    /// What it means, in one sentence.
    pub doc: &'static str,
    /// The fields of a section.
    pub nested: &'static [Field],
}

/// A configuration document or section, with the table of its fields.
pub trait Described {
    /// Every field, in document order.
    const FIELDS: &'static [Field];
}

/// Calls `visit` with the dotted path of every field that is not itself a section.
pub fn walk(fields: &'static [Field], visit: &mut impl FnMut(&str, &'static Field)) {
    fn inner(prefix: &str, fields: &'static [Field], visit: &mut impl FnMut(&str, &'static Field)) {
        for field in fields {
            let path = if prefix.is_empty() { field.name.to_owned() } else { format!("{prefix}.{}", field.name) };
            if field.presence == Presence::Nested {
                inner(&path, field.nested, visit);
            } else {
                visit(&path, field);
            }
        }
    }
    inner("", fields, visit);
}

/// The field at a dotted path; a path that goes on below a map or a list finds that map or list.
pub fn find(fields: &'static [Field], path: &str) -> Option<&'static Field> {
    let (head, rest) = path.split_once('.').unwrap_or((path, ""));
    let name = head.split('[').next().unwrap_or(head);
    let field = fields.iter().find(|field| field.name == name)?;
    if field.presence == Presence::Nested && !rest.is_empty() { find(field.nested, rest) } else { Some(field) }
}

/// Writes a document down as a table: struct, [`Default`] and [`Described`] from the same rows.
///
/// `rust_name "jsonName": Type = default, presence, used | later | never | part("what is done"), "meaning";`
macro_rules! document {
    (
        $(#[$outer:meta])*
        pub struct $name:ident {
            $( $(#[$attr:meta])* $field:ident $json:literal: $ty:ty $(= $default:expr)?, $presence:ident, $used:ident $(($part:literal))?, $doc:literal; )*
        }
    ) => {
        $(#[$outer])*
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name {
            $( #[doc = $doc] $(#[$attr])* #[serde(rename = $json)] pub $field: $ty, )*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $( $field: $crate::config::schema::document!(@default $($default)?), )* }
            }
        }

        impl $crate::config::schema::Described for $name {
            const FIELDS: &'static [$crate::config::schema::Field] = &[
                $( $crate::config::schema::Field {
                    name: $json,
                    presence: $crate::config::schema::document!(@presence $presence),
                    honoured: $crate::config::schema::document!(@used $used),
                    obsolete: $crate::config::schema::document!(@obsolete $used),
                    part: $crate::config::schema::document!(@part $($part)?),
                    doc: $doc,
                    nested: $crate::config::schema::document!(@nested $presence $ty),
                }, )*
            ];
        }
    };
    (@default) => { Default::default() };
    (@default $default:expr) => { ($default).into() };
    (@presence pointer) => { $crate::config::schema::Presence::Pointer };
    (@presence value) => { $crate::config::schema::Presence::Value };
    (@presence nested) => { $crate::config::schema::Presence::Nested };
    (@used used) => { true };
    (@used part) => { true };
    (@used later) => { false };
    (@used never) => { false };
    (@obsolete never) => { true };
    (@obsolete $used:ident) => { false };
    (@part) => { None };
    (@part $part:literal) => { Some($part) };
    (@nested nested $ty:ty) => { <$ty as $crate::config::schema::Described>::FIELDS };
    (@nested $presence:ident $ty:ty) => { &[] };
}
pub(crate) use document;
