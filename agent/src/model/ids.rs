//! Identities. Cheap to clone, compared by content.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use serde::Serializer;
use serde::ser::SerializeStruct as _;

macro_rules! identity {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        pub struct $name(Arc<str>);

        impl $name {
            /// The identity as the runtime or the API spells it.
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// True for the empty string, which names nothing.
            pub fn is_empty(&self) -> bool {
                self.0.is_empty()
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(Arc::from(text))
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(Arc::from(text))
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }
    };
}

identity! {
    /// `metadata.uid` of a pod; for static pods the hash that the source computed.
    PodUid
}
identity! {
    /// The runtime's id of one container instance, without `type://`.
    ContainerId
}
identity! {
    /// The runtime's id of one pod sandbox instance.
    SandboxId
}

/// A pod as logs and events name it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PodRef {
    /// The pod's UID.
    pub uid: PodUid,
    /// The pod's namespace.
    pub namespace: Arc<str>,
    /// The pod's name (with the node suffix, for static pods).
    pub name: Arc<str>,
}

impl PodRef {
    /// `name_namespace`, the full name by which mirror and static pods find each other.
    pub fn full_name(&self) -> String {
        format!("{}_{}", self.name, self.namespace)
    }

    /// The name of the folder of its logs, by which log collectors find them.
    pub fn log_dir_name(&self) -> String {
        format!("{}_{}_{}", self.namespace, self.name, self.uid)
    }
}

impl PodRef {
    /// Namespace, name and UID: unlike the full name, unique over time.
    pub fn with_uid(&self) -> String {
        format!("{self}({})", self.uid)
    }
}

impl Serialize for PodRef {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("PodRef", 3)?;
        fields.serialize_field("uid", &self.uid)?;
        fields.serialize_field("namespace", &*self.namespace)?;
        fields.serialize_field("name", &*self.name)?;
        fields.end()
    }
}

impl fmt::Display for PodRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
