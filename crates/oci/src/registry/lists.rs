//! What a repository has: tags, and what refers to a manifest.

use std::sync::Arc;

use reqwest::header::{ACCEPT, HeaderMap, HeaderValue, LINK};
use reqwest::{Method, Url};
use serde::Deserialize;

use super::hosts::Capability;
use super::transport::Ask;
use super::{Cause, Core, Registry, RegistryError};
use crate::Digest;
use crate::manifest::{Descriptor, MANIFEST_MAX, MANIFESTS_MAX, ManifestError};

/// The most tags that are listed.
const TAGS_MAX: usize = 100_000;
/// The most pages of a list. Registries have from 50 to 1000 entries on one.
const PAGES_MAX: usize = 500;
/// Source: OCI image-spec 1.1, `media-types.md`.
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// Something that has a manifest as its `subject`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Referrer {
    /// Where and what it is.
    #[serde(flatten)]
    pub descriptor: Descriptor,
    /// What it is for, such as a signature; may be empty.
    #[serde(default)]
    pub artifact_type: String,
}

impl Registry {
    /// All tags, in the registry's order.
    ///
    /// # Errors
    /// [`RegistryError`].
    pub fn tags(&self) -> Result<Vec<String>, RegistryError> {
        self.run("list the tags", |core| async move {
            let mut turns = core.turns("list the tags", Capability::Resolve, None);
            loop {
                let index = turns.next().await?;
                match core.tags(index).await {
                    Ok(tags) => return Ok(tags),
                    Err(cause) => turns.failed(cause),
                }
            }
        })
    }

    /// What refers to a manifest, of one type or of any. Registries that have no such list keep an index under a tag.
    ///
    /// # Errors
    /// [`RegistryError`].
    pub fn referrers(
        &self,
        digest: &Digest,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Referrer>, RegistryError> {
        let what = format!("list what refers to {digest}");
        let (subject, wanted) = (*digest, artifact_type.map(str::to_owned));
        let mut found = self.run(&what.clone(), |core| async move {
            let mut turns = core.turns(&what, Capability::Resolve, None);
            loop {
                let index = turns.next().await?;
                match core.referrers(index, &subject, wanted.as_deref()).await {
                    Ok(referrers) => return Ok(referrers),
                    Err(cause) => turns.failed(cause),
                }
            }
        })?;
        // Registries need not filter, and some do it wrong.
        found.retain(|one| artifact_type.is_none_or(|wanted| one.artifact_type == wanted));
        Ok(found)
    }
}

#[derive(Deserialize)]
struct Tags {
    #[serde(default)]
    tags: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct Referrers {
    #[serde(default)]
    manifests: Option<Vec<Referrer>>,
}

impl Core {
    async fn tags(&self, index: usize) -> Result<Vec<String>, Cause> {
        let mut all = Vec::new();
        let mut next = Some(self.ask(index, Method::GET, "tags/list?n=1000")?);
        for _ in 0..PAGES_MAX {
            let Some(ask) = next.take() else { break };
            let (page, following): (Tags, _) =
                self.page(index, ask).await?.ok_or_else(unavailable)?;
            all.extend(page.tags.unwrap_or_default());
            if all.len() > TAGS_MAX {
                return Err(too_many("tags", all.len(), TAGS_MAX));
            }
            next = following;
        }
        Ok(all)
    }

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
        for _ in 0..PAGES_MAX {
            let Some(ask) = next.take() else { break };
            let Some((page, following)) = self.page::<Referrers>(index, ask).await? else {
                return self.referrers_by_tag(index, subject).await;
            };
            all.extend(page.manifests.unwrap_or_default());
            if all.len() > MANIFESTS_MAX {
                return Err(too_many("referrers", all.len(), MANIFESTS_MAX));
            }
            next = following;
        }
        Ok(all)
    }

    /// Source: OCI distribution-spec 1.1, "Referrers Tag Schema".
    async fn referrers_by_tag(
        &self,
        index: usize,
        subject: &Digest,
    ) -> Result<Vec<Referrer>, Cause> {
        let tag: String = subject.to_string().replace(':', "-").chars().take(128).collect();
        let ask = self
            .ask(index, Method::GET, &format!("manifests/{tag}"))?
            .header(ACCEPT, HeaderValue::from_static(INDEX));
        let page: Option<(Referrers, _)> = self.page(index, ask).await?;
        let found = page.and_then(|(page, _)| page.manifests).unwrap_or_default();
        if found.len() > MANIFESTS_MAX {
            return Err(too_many("referrers", found.len(), MANIFESTS_MAX));
        }
        Ok(found)
    }

    /// One page, and how to ask for the next. `None` where there is nothing of the kind.
    async fn page<T: for<'a> Deserialize<'a>>(
        &self,
        index: usize,
        ask: Ask,
    ) -> Result<Option<(T, Option<Ask>)>, Cause> {
        let answer = self.call(index, &ask).await?;
        let status = answer.response.status().as_u16();
        if status != 200 {
            let cause = self.failure(index, answer).await;
            // Some say 400 or 405 where a newer part of the protocol is not known.
            let is_absent = matches!(cause, Cause::NotFound { .. }) || matches!(status, 400 | 405);
            return if is_absent { Ok(None) } else { Err(cause) };
        }
        let following = next_page(answer.response.headers(), &ask.url);
        let bytes = self.transport.body(answer.response, MANIFEST_MAX).await?;
        let page = serde_json::from_slice(&bytes)
            .map_err(|source| Cause::Document(ManifestError::Json { kind: "list", source }))?;
        let following = following.map(|url| Ask { url, ..ask });
        Ok(Some((page, following)))
    }
}

fn unavailable() -> Cause {
    Cause::NotFound { words: String::new() }
}

fn too_many(what: &'static str, count: usize, max: usize) -> Cause {
    Cause::Document(ManifestError::TooMany { what, count, max })
}

/// `<ADDRESS>; rel="next"`. Source: RFC 8288.
fn next_page(headers: &HeaderMap, from: &Url) -> Option<Url> {
    let links = headers.get_all(LINK).iter().filter_map(|value| value.to_str().ok());
    links.flat_map(|text| text.split(',')).find_map(|link| {
        let (address, parameters) = link.trim().strip_prefix('<')?.split_once('>')?;
        let is_next = parameters.split(';').any(|one| {
            one.trim().strip_prefix("rel=").is_some_and(|rel| rel.trim_matches('"') == "next")
        });
        let url = from.join(address).ok()?;
        // Whatever a list leads to elsewhere is not this registry's list.
        (is_next && url.origin() == from.origin()).then_some(url)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(link: &str, expect: Option<&str>) {
        let mut headers = HeaderMap::new();
        headers.insert(LINK, link.parse().unwrap());
        let from = Url::parse("https://a.io/v2/x/tags/list?n=2").unwrap();
        assert_eq!(next_page(&headers, &from).map(String::from).as_deref(), expect, "{link}");
    }

    #[test]
    fn pages() {
        let next = Some("https://a.io/v2/x/tags/list?last=b&n=2");
        check("</v2/x/tags/list?last=b&n=2>; rel=\"next\"", next);
        check("<list?last=b&n=2>;rel=next", next);
        check("</first>; rel=\"first\", <list?last=b&n=2>; rel=\"next\"", next);
        check("<https://b.io/v2/x/tags/list>; rel=\"next\"", None);
        check("</v2/x>; rel=\"prev\"", None);
        check("x", None);
    }
}
