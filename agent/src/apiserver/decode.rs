//! Objects of lists and watches, each decoded on its own: one that cannot be decoded does not affect the others.
//!
//! The API server stores values that the agent's types cannot represent, such as times after 9999-12-30T22:00:00Z. With the
//! client library's own methods every request for a list, or a watch, fails as a whole because of one such field.

use std::collections::HashMap;

use futures_util::AsyncBufRead;
use futures_util::AsyncBufReadExt as _;
use futures_util::AsyncReadExt as _;
use futures_util::StreamExt as _;
use futures_util::stream;
use futures_util::stream::BoxStream;
use http::Request;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use kube::Client;
use kube::api::Resource;
use kube::core::Status;
use kube::core::watch::Bookmark;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::Path;
use serde_path_to_error::Segment;

use crate::model::quote::Excerpt;

/// Longest line of a watch, in bytes: many times the largest object that etcd takes by default.
const MAX_LINE: u64 = 64 << 20;
/// So many objects that cannot be decoded are remembered.
const MOST_IGNORED: usize = 1000;
/// At most so many single fields are left out of an object, and as many lists of a status; each takes another try.
const MOST_LEFT_OUT: usize = 20;
/// The latest time that can be decoded. It replaces a `deletionTimestamp` that cannot be decoded.
const LATEST: &str = "9999-12-30T22:00:00Z";

/// What identifies an object and this state of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Identity {
    /// Empty for an object of the whole cluster.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// The version of this state.
    pub resource_version: String,
    /// When it is to be gone, in whatever form: it was deleted, and waits for its end.
    pub deletion_timestamp: Option<String>,
}

/// An object of which only the identity is decoded.
#[derive(Default, Deserialize)]
pub(super) struct Named {
    #[serde(default)]
    pub metadata: Identity,
}

/// An object that cannot be decoded.
#[derive(Debug)]
pub(super) struct Undecodable {
    pub identity: Identity,
    /// The field that cannot be decoded.
    pub field: String,
    pub problem: String,
    /// All that was received of it.
    pub object: Value,
}

/// An object, if it can be decoded.
pub(super) type Decoded<K> = Result<K, Box<Undecodable>>;

/// One line of a watch.
#[derive(Deserialize)]
#[serde(tag = "type", content = "object")]
pub(super) enum WatchLine<K> {
    /// An object of the initial list, or one that was created or changed.
    #[serde(rename = "ADDED", alias = "MODIFIED")]
    Changed(K),
    #[serde(rename = "DELETED")]
    Deleted(Named),
    #[serde(rename = "BOOKMARK")]
    Bookmark(Bookmark),
    #[serde(rename = "ERROR")]
    Error(Box<Status>),
}

impl<K> WatchLine<K> {
    fn map<T>(self, change: impl FnOnce(K) -> T) -> WatchLine<T> {
        match self {
            Self::Changed(object) => WatchLine::Changed(change(object)),
            Self::Deleted(object) => WatchLine::Deleted(object),
            Self::Bookmark(mark) => WatchLine::Bookmark(mark),
            Self::Error(status) => WatchLine::Error(status),
        }
    }
}

/// The lines of an open watch.
pub(super) type Lines<K> = BoxStream<'static, kube::Result<WatchLine<Decoded<K>>>>;

/// Opens the watch that `request` asks for.
///
/// # Errors
/// The API server does not open it.
pub(super) async fn watch<K>(client: &Client, request: Request<Vec<u8>>) -> kube::Result<Lines<K>>
where
    K: DeserializeOwned + Send + 'static,
{
    let body = Box::pin(client.request_stream(request).await?);
    let lines = stream::unfold(body, |mut body| async move {
        let line = next_line::<K, _>(&mut body).await.transpose()?;
        Some((line, body))
    });
    Ok(lines.boxed())
}

/// `None` at the end.
async fn next_line<K, R>(body: &mut R) -> kube::Result<Option<WatchLine<Decoded<K>>>>
where
    K: DeserializeOwned,
    R: AsyncBufRead + Unpin,
{
    loop {
        let mut line = Vec::new();
        let read = (&mut *body).take(MAX_LINE).read_until(b'\n', &mut line).await;
        let read = match read {
            Ok(read) => read,
            Err(error) if is_cut_off(&error) => return Ok(None),
            Err(error) => return Err(kube::Error::ReadEvents(error)),
        };
        match read as u64 {
            0 => return Ok(None),
            MAX_LINE => return Err(kube::Error::LinesCodecMaxLineLengthExceeded),
            _ => {}
        }
        match decode_line(&line) {
            Ok(line) => return Ok(Some(line)),
            // The connection broke off within the line, or the line is empty.
            Err(error) if error.is_eof() => {}
            Err(error) => return Err(kube::Error::SerdeError(error)),
        }
    }
}

/// The connection ended without the end of the body, as when a load balancer closes it: the watch is resumed as after its end.
fn is_cut_off(error: &std::io::Error) -> bool {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        let io = error.downcast_ref::<std::io::Error>();
        if io.is_some_and(|io| io.kind() == std::io::ErrorKind::UnexpectedEof) {
            return true;
        }
        if error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_incomplete_message) {
            return true;
        }
        // `io::Error::source` skips the error that it holds.
        source = io.and_then(|io| io.get_ref()).map(|held| held as _).or_else(|| error.source());
    }
    false
}

fn decode_line<K: DeserializeOwned>(line: &[u8]) -> serde_json::Result<WatchLine<Decoded<K>>> {
    match serde_json::from_slice::<WatchLine<K>>(line) {
        Ok(line) => Ok(line.map(Ok)),
        Err(_) => Ok(serde_json::from_slice::<WatchLine<Value>>(line)?.map(decode)),
    }
}

/// A page of a list.
#[derive(Deserialize)]
#[serde(bound(deserialize = "K: Deserialize<'de>"))]
pub(super) struct List<K> {
    #[serde(default)]
    pub metadata: ListMeta,
    /// May be null but not missing: whatever else answered has no objects either, and is not an empty list.
    #[serde(deserialize_with = "Option::deserialize")]
    pub items: Option<Vec<K>>,
}

impl<K> List<K> {
    fn map<T>(self, change: impl FnMut(K) -> T) -> List<T> {
        let items = self.items.map(|items| items.into_iter().map(change).collect());
        List { metadata: self.metadata, items }
    }
}

/// Reads the page that `request` asks for.
///
/// # Errors
/// The API server does not answer with a list.
pub(super) async fn list<K: DeserializeOwned>(
    client: &Client,
    request: Request<Vec<u8>>,
) -> kube::Result<List<Decoded<K>>> {
    let text = client.request_text(request).await?;
    decode_list(&text).map_err(kube::Error::SerdeError)
}

fn decode_list<K: DeserializeOwned>(text: &str) -> serde_json::Result<List<Decoded<K>>> {
    match serde_json::from_str::<List<K>>(text) {
        Ok(list) => Ok(list.map(Ok)),
        Err(_) => Ok(serde_json::from_str::<List<Value>>(text)?.map(decode)),
    }
}

/// One object of several that cannot all be decoded.
fn decode<K: DeserializeOwned>(object: Value) -> Decoded<K> {
    serde_path_to_error::deserialize(&object).map_err(|error| {
        let (field, problem) = (error.path().to_string(), Excerpt(&error.inner().to_string()).to_string());
        let Named { metadata: identity } = Named::deserialize(&object).unwrap_or_default();
        Box::new(Undecodable { identity, field, problem, object })
    })
}

/// The fields that may be left out of an object if they cannot be decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Optional {
    /// No field.
    Nothing,
    /// Any field.
    All,
    /// The status as a whole.
    Status,
    /// Of a pod: fields of its status. A `deletionTimestamp` is replaced, and its grace period left out.
    OfPods,
}

impl Optional {
    /// Removes the field at this path, which cannot be decoded; `None` if the object needs it. Of a status from which `many`
    /// were removed already, the whole field below `status` goes, such as its list of conditions.
    fn leave_out(self, object: &mut Value, path: &Path, many: bool) -> Option<()> {
        let mut steps = path.iter();
        let is_of_status = matches!(steps.next(), Some(Segment::Map { key }) if key == "status");
        match self {
            Self::Nothing => None,
            Self::All if many => None,
            Self::All => remove_field(object, path),
            Self::Status if is_of_status => object.as_object_mut()?.remove("status").map(drop),
            Self::OfPods if is_of_status && many => {
                let Segment::Map { key } = steps.next()? else { return None };
                object.get_mut("status")?.as_object_mut()?.remove(key).map(drop)
            }
            Self::OfPods if is_of_status => remove_field(object, path),
            Self::OfPods if path.to_string() == "metadata.deletionTimestamp" => {
                let metadata = object.get_mut("metadata")?.as_object_mut()?;
                // The grace period of the spec counts instead.
                metadata.remove("deletionGracePeriodSeconds");
                *metadata.get_mut("deletionTimestamp")? = LATEST.into();
                Some(())
            }
            Self::Status | Self::OfPods => None,
        }
    }
}

/// The object without optional fields that cannot be decoded. `None` if it cannot be decoded without them either.
fn without_fields<K: DeserializeOwned>(mut object: Value, optional: Optional) -> Option<K> {
    for left_out in 0..=2 * MOST_LEFT_OUT {
        let decoded: Result<K, _> = serde_path_to_error::deserialize(&object);
        match decoded {
            Ok(decoded) => return Some(decoded),
            Err(error) => optional.leave_out(&mut object, error.path(), left_out >= MOST_LEFT_OUT)?,
        }
    }
    None
}

/// Removes the field at this path; `None` if there is none.
fn remove_field(object: &mut Value, path: &Path) -> Option<()> {
    let steps: Vec<&Segment> = path.iter().collect();
    let (Segment::Map { key: field }, parents) = steps.split_last()? else { return None };
    let mut parent = object;
    for step in parents {
        parent = match step {
            Segment::Map { key } => parent.get_mut(key)?,
            Segment::Seq { index } => parent.get_mut(*index)?,
            Segment::Enum { .. } | Segment::Unknown => return None,
        };
    }
    parent.as_object_mut()?.remove(field).map(drop)
}

/// Logs objects that cannot be decoded, each once for each field that is the reason.
pub(super) struct Ignored {
    kind: String,
    /// Where the object can be decoded without some of these, only they are ignored.
    optional: Optional,
    /// By UID.
    fields: HashMap<String, String>,
}

impl Ignored {
    /// `kind` names the objects in log lines.
    pub(super) fn new(kind: &str, optional: Optional) -> Self {
        Self { kind: kind.to_owned(), optional, fields: HashMap::new() }
    }

    /// The object, or the identity of one that is ignored.
    pub(super) fn check<K: Resource + DeserializeOwned>(&mut self, object: Decoded<K>) -> Result<K, Identity> {
        match object {
            Ok(object) => {
                self.remove(object.meta().uid.as_deref().unwrap_or_default());
                Ok(object)
            }
            Err(object) => {
                let is_new = self.add(&object);
                let Undecodable { identity, field, problem: error, object } = *object;
                let rest: Option<K> = without_fields(object, self.optional);
                if is_new {
                    let what = if rest.is_some() { "field" } else { "object" };
                    let (Identity { namespace, name, .. }, kind) = (&identity, &self.kind);
                    tracing::error!(kind, namespace, name, field, error, "{what} cannot be decoded and is ignored");
                }
                rest.ok_or(identity)
            }
        }
    }

    /// False if the object was added before because of the same field.
    fn add(&mut self, object: &Undecodable) -> bool {
        if self.fields.len() >= MOST_IGNORED {
            self.fields.clear();
        }
        let before = self.fields.insert(object.identity.uid.clone(), object.field.clone());
        before.as_ref() != Some(&object.field)
    }

    /// The object was decoded, or deleted.
    pub(super) fn remove(&mut self, uid: &str) {
        self.fields.remove(uid);
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    use super::*;

    fn pod(name: &str, start: &str) -> Value {
        json!({"metadata": {"namespace": "n", "name": name, "uid": format!("{name}-uid"), "resourceVersion": "7"},
               "status": {"startTime": start}})
    }

    /// `a`, or `~n/b b-uid 7 status.startTime`.
    fn shown(decoded: Decoded<Pod>) -> String {
        match decoded {
            Ok(pod) => pod.metadata.name.unwrap_or_default(),
            Err(object) => {
                let Identity { namespace, name, uid, resource_version, .. } = object.identity;
                format!("~{namespace}/{name} {uid} {resource_version} {}", object.field)
            }
        }
    }

    const GOOD: &str = "2026-01-01T00:00:00Z";
    const BEYOND: &str = "9999-12-31T23:59:59Z";

    #[tokio::test]
    async fn lines_are_decoded_one_by_one() {
        let line = |kind: &str, object: Value| json!({"type": kind, "object": object}).to_string();
        let mark = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"resourceVersion": "8"}});
        let lines = [
            line("ADDED", pod("a", GOOD)),
            line("ADDED", pod("b", BEYOND)),
            String::new(),
            line("MODIFIED", pod("c", GOOD)),
            line("DELETED", pod("b", BEYOND)),
            line("BOOKMARK", mark),
            line("ERROR", json!({"code": 410})),
            line("ADDED", pod("cut-off", GOOD)).trim_end_matches('}').to_owned(),
        ];
        let text = lines.join("\n");
        let (mut body, mut seen) = (text.as_bytes(), Vec::new());
        while let Some(line) = next_line::<Pod, _>(&mut body).await.expect("lines") {
            seen.push(match line {
                WatchLine::Changed(object) => shown(object),
                WatchLine::Deleted(object) => format!("-{}", object.metadata.uid),
                WatchLine::Bookmark(mark) => format!("bookmark {}", mark.metadata.resource_version),
                WatchLine::Error(status) => status.code.to_string(),
            });
        }
        assert_eq!(seen, ["a", "~n/b b-uid 7 status.startTime", "c", "-b-uid", "bookmark 8", "410"]);
        let mut other = "{\"kind\": \"Status\"}\n".as_bytes();
        assert!(next_line::<Pod, _>(&mut other).await.is_err());
    }

    #[test]
    fn a_connection_that_is_cut_off_ends_a_watch_without_an_error() {
        use std::io::Error;
        use std::io::ErrorKind;
        let cut = Error::other(Error::other(Error::from(ErrorKind::UnexpectedEof)));
        assert!(is_cut_off(&cut));
        assert!(!is_cut_off(&Error::other(Error::from(ErrorKind::ConnectionReset))));
    }

    #[test]
    fn objects_of_a_list_are_decoded_one_by_one() {
        let list = |items: Value| json!({"metadata": {"resourceVersion": "8"}, "items": items}).to_string();
        let decoded = |text: &str| {
            let list = decode_list::<Pod>(text)?;
            assert_eq!(list.metadata.resource_version.as_deref(), Some("8"));
            serde_json::Result::Ok(list.items.into_iter().flatten().map(shown).collect::<Vec<_>>())
        };
        let odd = decoded(&list(json!([pod("a", GOOD), pod("b", BEYOND), pod("c", GOOD)])));
        assert_eq!(odd.expect("a list"), ["a", "~n/b b-uid 7 status.startTime", "c"]);
        assert_eq!(decoded(&list(json!([pod("a", GOOD)]))).expect("a list"), ["a"]);
        assert_eq!(decoded(&list(json!(null))).expect("a list"), [""; 0]);
        assert!(decoded("{\"kind\": \"Status\"}").is_err(), "not an empty list");
    }

    #[test]
    fn fields_that_cannot_be_decoded_are_left_out_where_the_rest_can_be() {
        let mut odd = pod("a", BEYOND);
        odd["spec"] = json!({"containers": [], "tolerations": [{"key": "b", "tolerationSeconds": "x"}, {"key": "c"}]});
        let decoded: Pod = without_fields(odd, Optional::All).expect("the rest");
        let expected = json!({"apiVersion": "v1", "kind": "Pod", "status": {},
            "metadata": {"namespace": "n", "name": "a", "uid": "a-uid", "resourceVersion": "7"},
            "spec": {"containers": [], "tolerations": [{"key": "b"}, {"key": "c"}]}});
        assert_eq!(serde_json::to_value(decoded).expect("JSON"), expected);
        let conditions =
            |count: usize| json!({"status": {"conditions": vec![json!({"lastProbeTime": BEYOND}); count]}});
        let is_decoded = |object: Value, optional| without_fields::<Pod>(object, optional).is_some();
        assert!(is_decoded(conditions(MOST_LEFT_OUT), Optional::All));
        assert!(!is_decoded(conditions(MOST_LEFT_OUT + 1), Optional::All), "bounded");
        let mut many = conditions(1000);
        many["status"]["phase"] = json!("Failed");
        let rest: Pod = without_fields(many, Optional::OfPods).expect("the rest");
        assert_eq!(serde_json::to_value(rest.status).expect("JSON"), json!({"phase": "Failed"}));
        assert!(!is_decoded(conditions(1), Optional::Nothing));
        assert!(!is_decoded(json!([1]), Optional::All), "no field to leave out");
        assert!(!is_decoded(json!({"metadata": {"finalizers": [1]}}), Optional::All), "an element is no field");
    }

    #[test]
    fn of_pods_the_status_and_the_end_of_the_deletion_may_be_left_out() {
        let mut odd = pod("a", BEYOND);
        odd["metadata"]["deletionTimestamp"] = json!(BEYOND);
        odd["metadata"]["deletionGracePeriodSeconds"] = json!(i64::MAX);
        odd["status"]["phase"] = json!("Failed");
        odd["status"]["conditions"] = json!([{"type": "x", "status": "True", "lastTransitionTime": BEYOND}]);
        let decoded: Pod = without_fields(odd, Optional::OfPods).expect("the rest");
        let expected = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": "n", "name": "a", "uid": "a-uid", "resourceVersion": "7", "deletionTimestamp": LATEST},
            "status": {"phase": "Failed", "conditions": [{"type": "x", "status": "True"}]}});
        assert_eq!(serde_json::to_value(decoded).expect("JSON"), expected);
        for (object, field) in [("metadata", "creationTimestamp"), ("spec", "activeDeadlineSeconds")] {
            let mut needed = pod("a", BEYOND);
            needed["spec"] = json!({"containers": []});
            needed[object][field] = json!(BEYOND);
            assert!(without_fields::<Pod>(needed, Optional::OfPods).is_none(), "{object}.{field}");
        }
    }

    #[test]
    fn an_object_is_new_once_for_each_field() {
        let mut ignored = Ignored::new("pods", Optional::Nothing);
        let object = |uid: &str, field: &str| Undecodable {
            identity: Identity { uid: uid.to_owned(), ..Identity::default() },
            field: field.to_owned(),
            problem: String::new(),
            object: Value::Null,
        };
        let table = [("a", "x", true), ("a", "x", false), ("b", "x", true), ("a", "y", true), ("a", "y", false)];
        for (uid, field, is_new) in table {
            assert_eq!(ignored.add(&object(uid, field)), is_new, "{uid} {field}");
        }
        ignored.remove("a");
        assert!(ignored.add(&object("a", "y")));
    }
}
