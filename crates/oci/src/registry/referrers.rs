//! Referrers of a manifest. They are listed by the registry, or else in an index that clients maintain in the
//! registry.
//!
//! Source: OCI distribution-spec 1.1, "Listing Referrers", "Pushing Manifests with Subject", "Referrers Tag Schema".

use std::collections::BTreeMap;
use std::sync::Arc;

use reqwest::Method;
use reqwest::header::{ACCEPT, HeaderValue};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::hosts::Capability;
use super::lists::{count_page, too_many, unavailable};
use super::{AskedHosts, Cause, Core, Registry, RegistryError, patience};
use crate::Digest;
use crate::manifest::{Descriptor, INDEX, MANIFEST_MAX, MANIFESTS_MAX, ManifestError};

/// Maximum number of hash characters in the index's tag.
const TAG_DIGEST_MAX: usize = 64;
/// Maximum number of writes of the index, if other clients write it at the same time.
const WRITES_MAX: u32 = 5;

/// An artifact that has a manifest as its `subject`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Referrer {
    /// Descriptor of its manifest.
    #[serde(flatten)]
    pub descriptor: Descriptor,
    /// Purpose of the artifact, such as a signature. May be empty.
    #[serde(default, deserialize_with = "crate::manifest::or_default")]
    pub artifact_type: String,
}

/// How often a host is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tries {
    /// Again after passing failures.
    Usual,
    Once,
}

impl Registry {
    /// Returns the referrers of a manifest, of one artifact type or of all. For registries without the referrers API,
    /// reads the index under the fallback tag.
    ///
    /// # Errors
    /// [`RegistryError`] if the list cannot be fetched or is too long.
    pub fn referrers(
        &self,
        digest: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Referrer>, RegistryError> {
        self.list_referrers(digest, artifact_type, None, Tries::Usual)
    }

    /// As [`referrers`](Self::referrers), but only these hosts are asked.
    ///
    /// # Errors
    /// As [`referrers`](Self::referrers).
    pub fn referrers_at(
        &self,
        hosts: AskedHosts,
        digest: &Digest,
        artifact_type: &str,
    ) -> Result<Vec<Referrer>, RegistryError> {
        self.list_referrers(digest, Some(artifact_type), Some(hosts), Tries::Usual)
    }

    /// As [`referrers_at`](Self::referrers_at), but each host is asked once, because the caller has another way to find
    /// the referrers.
    ///
    /// # Errors
    /// As [`referrers`](Self::referrers).
    pub fn referrers_once(
        &self,
        hosts: AskedHosts,
        digest: &Digest,
        artifact_type: &str,
    ) -> Result<Vec<Referrer>, RegistryError> {
        self.list_referrers(digest, Some(artifact_type), Some(hosts), Tries::Once)
    }

    fn list_referrers(
        &self,
        digest: &Digest,
        artifact_type: Option<&str>,
        hosts: Option<AskedHosts>,
        tries: Tries,
    ) -> Result<Vec<Referrer>, RegistryError> {
        let what = format!("list the referrers of {digest}");
        let (subject, wanted) = (*digest, artifact_type.map(str::to_owned));
        let mut found = self.run(&what.clone(), |core| async move {
            let turns = match hosts {
                None => core.turns(&what, Capability::Resolve, None),
                Some(hosts) => core.turns_among(&what, hosts),
            };
            let mut turns = match tries {
                Tries::Usual => turns,
                Tries::Once => turns.once(),
            };
            loop {
                let index = turns.next().await?;
                match turns.attempt(core.referrers(index, &subject, wanted.as_deref())).await {
                    // A peer knows only some of the referrers that the registry has.
                    Ok(none) if none.is_empty() && core.is_peer_mirror(index) => {
                        turns.failed(unavailable());
                    }
                    Ok(referrers) => return Ok(referrers),
                    Err(cause) => turns.failed(cause),
                }
            }
        })?;
        // The client filters the list, because registries need not filter it. Registries that do send
        // OCI-Filters-Applied, but some filter wrongly.
        found.retain(|one| artifact_type.is_none_or(|wanted| one.artifact_type == wanted));
        Ok(found)
    }

    /// Adds a manifest with a subject, which has just been put, to the index of the subject's referrers.
    pub(super) fn list_referrer(
        &self,
        digest: &Digest,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<(), RegistryError> {
        let Some((subject, entry)) = entry(digest, media_type, bytes) else { return Ok(()) };
        let what = format!("add {digest} to the referrers of {subject}");
        self.run(&what.clone(), |core| async move {
            let mut turns = core.turns(&what, Capability::Push, None);
            loop {
                let index = turns.next().await?;
                match core.add_referrer(index, &subject, &entry).await {
                    Ok(()) => return Ok(()),
                    Err(cause) => turns.failed(cause),
                }
            }
        })
    }
}

#[derive(Deserialize)]
struct Referrers {
    #[serde(default)]
    manifests: Option<Vec<Referrer>>,
}

impl Core {
    async fn referrers(
        self: &Arc<Self>,
        index: usize,
        subject: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Referrer>, Cause> {
        let mut ask = self.ask(index, Method::GET, &format!("referrers/{subject}"))?;
        if let Some(wanted) = artifact_type {
            ask.url.query_pairs_mut().append_pair("artifactType", wanted);
        }
        let mut all = Vec::new();
        let mut next = Some(ask.header(ACCEPT, HeaderValue::from_static(INDEX)));
        let mut pages = 0;
        while let Some(ask) = next.take() {
            pages = count_page(pages)?;
            let (page, following) = match self.page::<Referrers>(index, ask).await? {
                Some(page) => page,
                None if pages == 1 => return self.referrers_by_tag(index, subject).await,
                None => return Err(unavailable()),
            };
            all.extend(page.manifests.unwrap_or_default());
            if all.len() > MANIFESTS_MAX {
                return Err(too_many("referrers", all.len(), MANIFESTS_MAX));
            }
            next = following;
        }
        Ok(all)
    }

    async fn referrers_by_tag(
        &self,
        index: usize,
        subject: &Digest,
    ) -> Result<Vec<Referrer>, Cause> {
        let ask = self
            .ask(index, Method::GET, &format!("manifests/{}", tag(subject)))?
            .header(ACCEPT, HeaderValue::from_static(INDEX));
        let page: Option<(Referrers, _)> = self.page(index, ask).await?;
        let found = page.and_then(|(page, _)| page.manifests).unwrap_or_default();
        if found.len() > MANIFESTS_MAX {
            return Err(too_many("referrers", found.len(), MANIFESTS_MAX));
        }
        Ok(found)
    }

    /// Reads the index, adds the entry and writes it, on one host only, because a mirror may have an older index. Then
    /// reads the index once more, because registries have no atomic update and another client may have written the
    /// index in between.
    async fn add_referrer(
        self: &Arc<Self>,
        index: usize,
        subject: &Digest,
        entry: &Map<String, Value>,
    ) -> Result<(), Cause> {
        let tag = tag(subject);
        for turn in 0..WRITES_MAX {
            tokio::time::sleep(self.settings.backoff * turn.saturating_sub(1)).await;
            let fetch = self.fetch_manifest(index, &tag, None);
            let old = match patience::as_document(self.settings.patience, fetch).await {
                Ok(fetched) => Some(fetched.bytes),
                Err(Cause::NotFound { .. } | Cause::NameUnknown { .. }) => None,
                Err(cause) => return Err(cause),
            };
            let Some(new) = with_entry(old.as_deref(), entry).map_err(Cause::Document)? else {
                return Ok(());
            };
            self.put_manifest(index, &tag, INDEX, &new.into()).await?;
        }
        Err(Cause::Protocol(
            "the registry does not keep the list of referrers, or too many \
            clients change it at once"
                .to_owned(),
        ))
    }
}

/// Returns the tag of the index. Hashes longer than SHA-256 are truncated.
fn tag(subject: &Digest) -> String {
    let text = subject.to_string();
    let (algorithm, hash) = text.split_once(':').expect("a digest has a colon");
    format!("{algorithm}-{}", &hash[..hash.len().min(TAG_DIGEST_MAX)])
}

/// Returns the subject of a manifest or index, if it has one, and the entry for the subject's referrers.
fn entry(digest: &Digest, media_type: &str, bytes: &[u8]) -> Option<(Digest, Map<String, Value>)> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct About {
        subject: Subject,
        artifact_type: Option<String>,
        config: Option<Config>,
        annotations: Option<BTreeMap<String, String>>,
    }
    #[derive(Deserialize)]
    struct Subject {
        digest: String,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Config {
        media_type: Option<String>,
    }
    let About { subject, artifact_type, config, annotations } =
        serde_json::from_slice(bytes).ok()?;
    // A subject with an unknown hash function has no list of referrers.
    let subject = subject.digest.parse().ok()?;
    let of_config = || config.and_then(|config| config.media_type);
    let artifact_type = artifact_type.filter(|it| !it.is_empty()).or_else(of_config);
    let mut entry = Map::new();
    entry.insert("mediaType".to_owned(), media_type.into());
    entry.insert("digest".to_owned(), digest.to_string().into());
    entry.insert("size".to_owned(), bytes.len().into());
    if let Some(annotations) = annotations.filter(|it| !it.is_empty()) {
        entry.insert("annotations".to_owned(), json!(annotations));
    }
    if let Some(artifact_type) = artifact_type {
        entry.insert("artifactType".to_owned(), artifact_type.into());
    }
    Some((subject, entry))
}

/// Returns an index with one more entry. `None` if it has the entry already. Its other content is kept.
fn with_entry(
    old: Option<&[u8]>,
    entry: &Map<String, Value>,
) -> Result<Option<Vec<u8>>, ManifestError> {
    let kind = "index";
    let json = |source| ManifestError::Json { kind, source };
    let mut index: Map<String, Value> = match old {
        Some(bytes) => serde_json::from_slice(bytes).map_err(json)?,
        None => Map::new(),
    };
    if old.is_some() && !index.get("manifests").is_some_and(Value::is_array) {
        return Err(ManifestError::NotIndex);
    }
    if old.is_none() {
        index.insert("schemaVersion".to_owned(), 2.into());
        index.insert("mediaType".to_owned(), INDEX.into());
        index.insert("manifests".to_owned(), Value::Array(Vec::new()));
    }
    let list = index.get_mut("manifests").and_then(Value::as_array_mut).expect("it is an array");
    if list.iter().any(|one| one.get("digest") == entry.get("digest")) {
        return Ok(None);
    }
    list.push(Value::Object(entry.clone()));
    crate::manifest::check_count("referrers", list.len(), MANIFESTS_MAX)?;
    let bytes = serde_json::to_vec(&index).map_err(json)?;
    crate::manifest::check_size(kind, bytes.len() as u64, MANIFEST_MAX)?;
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Source of the cases: the example in "Referrers Tag Schema".
    #[test]
    fn tags() {
        let check = |digest: String, expect: String| {
            assert_eq!(tag(&digest.parse().unwrap()), expect);
        };
        check(format!("sha256:{}", "a".repeat(64)), format!("sha256-{}", "a".repeat(64)));
        check(format!("sha512:{}", "ab".repeat(64)), format!("sha512-{}", "ab".repeat(32)));
    }

    fn check_entry(manifest: &str, expect: &str) {
        let digest = Digest::sha256(b"x");
        let got = match entry(&digest, "m", manifest.as_bytes()) {
            Some((subject, entry)) => {
                assert_eq!(subject, Digest::sha256(b"s"));
                let size = format!(",\"size\":{}", manifest.len());
                let text = Value::Object(entry).to_string();
                text.replace(&digest.to_string(), "D").replace(&size, "")
            }
            None => "none".to_owned(),
        };
        assert_eq!(got, expect, "{manifest}");
    }

    #[test]
    fn entries() {
        let subject = format!(r#""subject":{{"digest":"{}"}}"#, Digest::sha256(b"s"));
        let check = |text: &str, expect: &str| check_entry(&format!("{{{subject}{text}}}"), expect);
        check_entry("{}", "none");
        check_entry("[", "none");
        check_entry(r#"{"subject":null}"#, "none");
        check_entry(r#"{"subject":{"digest":"sha3:12"}}"#, "none");
        check("", r#"{"mediaType":"m","digest":"D"}"#);
        check(
            r#","artifactType":"t","config":{"mediaType":"c"}"#,
            r#"{"mediaType":"m","digest":"D","artifactType":"t"}"#,
        );
        check(
            r#","artifactType":"","config":{"mediaType":"c"},"annotations":{"a":"b"}"#,
            r#"{"mediaType":"m","digest":"D","annotations":{"a":"b"},"artifactType":"c"}"#,
        );
    }

    fn check_index(old: Option<&str>, expect: &str) {
        let entry = json!({"digest": "new", "x": 1});
        let got = match with_entry(old.map(str::as_bytes), entry.as_object().unwrap()) {
            Ok(Some(bytes)) => String::from_utf8(bytes).unwrap(),
            Ok(None) => "as it is".to_owned(),
            Err(error) => error.to_string(),
        };
        assert_eq!(got, expect, "{old:?}");
    }

    #[test]
    fn indexes() {
        check_index(
            None,
            &format!(
                r#"{{"schemaVersion":2,"mediaType":"{INDEX}","manifests":[{{"digest":"new","x":1}}]}}"#
            ),
        );
        check_index(
            Some(r#"{"manifests":[{"digest":"old","y":[2]}],"z":{}}"#),
            r#"{"manifests":[{"digest":"old","y":[2]},{"digest":"new","x":1}],"z":{}}"#,
        );
        check_index(Some(r#"{"manifests":[{"digest":"new"}]}"#), "as it is");
        check_index(Some(r#"{"layers":[]}"#), "it is a manifest, but an index was expected");
        check_index(Some("["), "the index is malformed");
        let full = format!(r#"{{"manifests":[{}1]}}"#, "1,".repeat(MANIFESTS_MAX - 1));
        check_index(Some(&full), "there are 4097 referrers, more than 4096");
        let long = format!(r#"{{"manifests":["{}"]}}"#, "x".repeat(4 << 20));
        let error = with_entry(Some(long.as_bytes()), json!({"digest": 1}).as_object().unwrap())
            .unwrap_err();
        assert!(matches!(error, ManifestError::TooLarge { .. }), "{error}");
    }
}
