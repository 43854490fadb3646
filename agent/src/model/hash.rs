//! The hash by which a running container is compared with its definition in the spec: annotation
//! `io.kubernetes.container.hash`. Covers the name and the image, nothing else.

/// FNV-1a, 32 bits.
pub fn fnv1a_32(bytes: impl IntoIterator<Item = u8>) -> u32 {
    bytes.into_iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// FNV-1a, 64 bits.
pub fn fnv1a_64(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes
        .into_iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Hash of a container's definition. The same number the kubelet writes, so that containers survive a change from
/// one agent to the other: FNV-1a over the decimal byte list of the JSON object `{image, name}`.
pub fn container_hash(name: &str, image: &str) -> u64 {
    let json = format!(r#"{{"image":{},"name":{}}}"#, json_string(image), json_string(name));
    let list: Vec<String> = json.bytes().map(|byte| byte.to_string()).collect();
    u64::from(fnv1a_32(format!("([]uint8)[{}]", list.join(" ")).into_bytes()))
}

/// A JSON string in the spelling that also escapes what HTML would read.
fn json_string(text: &str) -> String {
    let escaped = serde_json::Value::from(text).to_string();
    [('<', "\\u003c"), ('>', "\\u003e"), ('&', "\\u0026"), ('\u{2028}', "\\u2028"), ('\u{2029}', "\\u2029")]
        .into_iter()
        .fold(escaped, |text, (char, escape)| text.replace(char, escape))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fnv_matches_its_published_values() {
        assert_eq!(fnv1a_32(*b""), 0x811c_9dc5);
        assert_eq!(fnv1a_32(*b"foobar"), 0xbf9c_f968);
        assert_eq!(fnv1a_64(*b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn equals_the_kubelets_hash() {
        assert_eq!(container_hash("test_container", "foo/image:v1"), 0x8e45_cbd0);
    }

    #[test]
    fn name_and_image_decide() {
        let hash = container_hash("main", "busybox:1");
        assert_eq!(hash, container_hash("main", "busybox:1"));
        assert_ne!(hash, container_hash("main", "busybox:2"));
        assert_ne!(hash, container_hash("other", "busybox:1"));
        assert_ne!(container_hash("a", "b"), container_hash("b", "a"));
        assert!(u32::try_from(hash).is_ok());
    }

    #[test]
    fn escapes_as_the_kubelet_does() {
        assert_eq!(json_string("a<b>&\"\\"), r#""a\u003cb\u003e\u0026\"\\""#);
    }
}
