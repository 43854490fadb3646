//! Docker's configuration of registries: user and password by registry or path. Pure.

use std::collections::BTreeMap;
use std::fmt;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::GeneralPurpose;
use base64::engine::general_purpose::GeneralPurposeConfig;
use secrecy::ExposeSecret as _;
use secrecy::SecretString;
use serde::Deserialize;
use serde::Serialize;
use sha2::Digest as _;

use crate::images::access::lower_hex;

/// User and password of one entry.
#[derive(Clone, Default)]
pub(crate) struct Login {
    pub(crate) username: String,
    pub(crate) password: SecretString,
    email: String,
}

/// Entries by registry, as they are written.
pub(crate) type Entries = BTreeMap<String, Login>;

/// A configuration that cannot be used. Names no content, which is secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigProblem {
    /// No JSON, or not in the form of a configuration.
    #[error("invalid docker configuration at line {line}, column {column}")]
    Json {
        /// Line, from 1.
        line: usize,
        /// Column, from 1; 0 for an end of text.
        column: usize,
    },
    /// The field `auth` is no Base64.
    #[error("unable to decode auth field: invalid base64")]
    Encoding,
    /// The field `auth` has no colon.
    #[error("unable to parse auth field, must be formatted as base64(username:password)")]
    NoColon,
}

impl Login {
    /// Without an e-mail address, as plugins return it.
    pub(crate) fn new(username: String, password: SecretString) -> Self {
        Self { username, password, email: String::new() }
    }

    /// SHA-256 of the entry in the notation of upstream's records: JSON as Go writes it.
    pub(crate) fn hash(&self) -> String {
        #[derive(Serialize)]
        struct Written<'a> {
            #[serde(skip_serializing_if = "str::is_empty")]
            username: &'a str,
            #[serde(skip_serializing_if = "str::is_empty")]
            password: &'a str,
            #[serde(skip_serializing_if = "str::is_empty")]
            email: &'a str,
        }
        let written = Written { username: &self.username, password: self.password.expose_secret(), email: &self.email };
        // A struct of strings can always be written.
        let json = SecretString::from(serde_json::to_string(&written).unwrap_or_default());
        let mut hasher = sha2::Sha256::new();
        for letter in json.expose_secret().chars() {
            match letter {
                '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                    hasher.update(format!("\\u{:04x}", u32::from(letter)).as_bytes());
                }
                other => hasher.update(other.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        lower_hex(&hasher.finalize())
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").finish_non_exhaustive()
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct WrittenEntry {
    username: Option<String>,
    password: Option<String>,
    email: Option<String>,
    auth: Option<String>,
}

type WrittenEntries = Option<BTreeMap<String, Option<WrittenEntry>>>;

/// The content of `config.json`, or of a secret's `.dockerconfigjson`.
///
/// # Errors
/// It is no such configuration; one bad entry makes all of it invalid.
pub(crate) fn parse_config_json(json: &[u8]) -> Result<Entries, ConfigProblem> {
    #[derive(Deserialize)]
    struct Written {
        #[serde(default)]
        auths: WrittenEntries,
    }
    let written: Option<Written> = serde_json::from_slice(json).map_err(|error| problem(&error))?;
    entries(written.and_then(|written| written.auths))
}

/// The content of `.dockercfg`.
///
/// # Errors
/// As [`parse_config_json`].
pub(crate) fn parse_dockercfg(json: &[u8]) -> Result<Entries, ConfigProblem> {
    entries(serde_json::from_slice(json).map_err(|error| problem(&error))?)
}

/// Serde's message may quote a value.
fn problem(error: &serde_json::Error) -> ConfigProblem {
    ConfigProblem::Json { line: error.line(), column: error.column() }
}

fn entries(written: WrittenEntries) -> Result<Entries, ConfigProblem> {
    let one = |(registry, entry): (String, Option<WrittenEntry>)| Ok((registry, login(entry.unwrap_or_default())?));
    written.unwrap_or_default().into_iter().map(one).collect()
}

fn login(entry: WrittenEntry) -> Result<Login, ConfigProblem> {
    let (username, password) = match entry.auth.filter(|auth| !auth.is_empty()) {
        Some(auth) => decode_auth(&auth)?,
        None => (entry.username.unwrap_or_default(), entry.password.unwrap_or_default().into()),
    };
    Ok(Login { username, password, email: entry.email.unwrap_or_default() })
}

/// `user:password` in Base64: padded if it ends in `=`, else without padding; line ends are skipped.
fn decode_auth(auth: &str) -> Result<(String, SecretString), ConfigProblem> {
    let text: String = auth.chars().filter(|letter| !matches!(letter, '\r' | '\n')).collect();
    let padding = match text.ends_with('=') {
        true => DecodePaddingMode::RequireCanonical,
        false => DecodePaddingMode::RequireNone,
    };
    let config = GeneralPurposeConfig::new().with_decode_padding_mode(padding).with_decode_allow_trailing_bits(true);
    let engine = GeneralPurpose::new(&alphabet::STANDARD, config);
    let bytes = engine.decode(text).map_err(|_| ConfigProblem::Encoding)?;
    let text = String::from_utf8(bytes).map_err(|_| ConfigProblem::Encoding)?;
    let (user, password) = text.split_once(':').ok_or(ConfigProblem::NoColon)?;
    Ok((user.to_owned(), password.into()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(entry: &serde_json::Value) -> Result<Entries, ConfigProblem> {
        parse_config_json(json!({"auths": {"r.io": entry}}).to_string().as_bytes())
    }

    #[test]
    fn entries_of_both_forms() {
        for entry in [
            json!({"username": "foo", "password": "bar"}),
            json!({"auth": "Zm9vOmJhcg"}),
            json!({"auth": "Zm9v\r\nOmJhcg=="}),
            json!({"auth": "Zm9vOm\nJhcg==\n"}),
            json!({"auth": "Zm9vOmJhcg==", "username": "other", "password": "x"}),
        ] {
            let found = config(&entry).expect("valid").remove("r.io").expect("an entry");
            assert_eq!((found.username.as_str(), found.password.expose_secret()), ("foo", "bar"), "{entry}");
            let old = parse_dockercfg(json!({"r.io": entry}).to_string().as_bytes()).expect("valid");
            assert_eq!(old["r.io"].username, "foo");
        }
        // `foo:a:b`: a password may have colons, a user name may not.
        let found = config(&json!({"auth": "Zm9vOmE6Yg=="})).expect("valid").remove("r.io").expect("an entry");
        assert_eq!((found.username.as_str(), found.password.expose_secret()), ("foo", "a:b"));
        for nothing in ["{}", r#"{"auths": null}"#, r#"{"credsStore": "x", "auths": {}}"#, "null"] {
            assert!(parse_config_json(nothing.as_bytes()).expect(nothing).is_empty());
        }
    }

    #[test]
    fn a_bad_entry_makes_the_whole_invalid_and_is_not_quoted() {
        for (entry, expected) in [
            (json!({"auth": "Zm9vOmJhcg== "}), ConfigProblem::Encoding),
            (json!({"auth": "Zm9v OmJhcg"}), ConfigProblem::Encoding),
            (json!({"auth": "cGFudHM="}), ConfigProblem::NoColon),
        ] {
            assert_eq!(config(&entry).err(), Some(expected), "{entry}");
        }
        let error = config(&json!("hunter2")).expect_err("no entry").to_string();
        assert!(error.starts_with("invalid docker configuration at line 1") && !error.contains("hunter2"), "{error}");
    }

    #[test]
    fn hashes_are_upstreams() {
        let login = |username: &str, password: &str, email: &str| {
            let entry = json!({"username": username, "password": password, "email": email});
            config(&entry).expect("valid").remove("r.io").expect("an entry").hash()
        };
        let plain = "a55436fc140d516560d072c5fe8700385ce9f41629abf65c1edcbcb39fac691d";
        assert_eq!(login("user", "password", ""), plain);
        assert_eq!(Login::new("user".into(), "password".into()).hash(), plain);
        let mailed = login("ada", "smash", "ada@example.com");
        assert!(mailed.starts_with("353258b5") && mailed.ends_with("7423"), "{mailed}");
        let escaped = login("u", "a<b", "");
        assert!(escaped.starts_with("c505c9ab") && escaped.ends_with("88f0"), "{escaped}");
    }

    #[test]
    fn logins_are_not_printed() {
        assert_eq!(format!("{:?}", Login::new("user".into(), "password".into())), "Login { .. }");
    }
}
