//! Lists in pages, and the list of tags.

use reqwest::header::{HeaderMap, LINK};
use reqwest::{Method, Url};
use serde::Deserialize;

use super::hosts::Capability;
use super::manifests::check_json;
use super::transport::Ask;
use super::{Cause, Core, Registry, RegistryError};
use crate::manifest::{MANIFEST_MAX, ManifestError};

/// Maximum number of tags in a list.
const TAGS_MAX: usize = 100_000;
/// Maximum number of pages of a list. Registries put 50 to 1000 entries on a page.
pub(super) const PAGES_MAX: usize = 500;
impl Registry {
    /// Returns all tags, in the registry's order.
    ///
    /// # Errors
    /// [`RegistryError`] if the list cannot be fetched or is too long.
    pub fn tags(&self) -> Result<Vec<String>, RegistryError> {
        self.run("list the tags", |core| async move {
            let mut turns = core.turns("list the tags", Capability::Resolve, None);
            loop {
                let index = turns.next().await?;
                match turns.attempt(core.tags(index)).await {
                    Ok(tags) => return Ok(tags),
                    Err(cause) => turns.failed(cause),
                }
            }
        })
    }
}

#[derive(Deserialize)]
struct Tags {
    #[serde(default)]
    tags: Option<Vec<String>>,
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

    /// Fetches one page. Returns it with the request for the next one, if any; `None` if the list does not exist.
    pub(super) async fn page<T: for<'a> Deserialize<'a>>(
        &self,
        index: usize,
        ask: Ask,
    ) -> Result<Option<(T, Option<Ask>)>, Cause> {
        let answer = self.call(index, &ask).await?;
        let status = answer.response.status().as_u16();
        if status != 200 {
            let cause = self.failure(index, answer).await;
            // Some registries return 400 or 405 if they do not support a newer part of the protocol.
            let is_absent = matches!(cause, Cause::NotFound { .. }) || matches!(status, 400 | 405);
            return if is_absent { Ok(None) } else { Err(cause) };
        }
        let headers = answer.response.headers().clone();
        let following = next_page(&headers, &ask.url);
        let bytes = self.transport.body(answer.response, MANIFEST_MAX).await?;
        check_json("a list", &bytes, &headers)?;
        let page = serde_json::from_slice(&bytes)
            .map_err(|source| Cause::Document(ManifestError::Json { kind: "list", source }))?;
        let following = following.map(|url| Ask { url, ..ask });
        Ok(Some((page, following)))
    }
}

fn unavailable() -> Cause {
    Cause::NotFound { words: String::new() }
}

pub(super) fn too_many(what: &'static str, count: usize, max: usize) -> Cause {
    Cause::Document(ManifestError::TooMany { what, count, max })
}

/// Returns the address in `<ADDRESS>; rel="next"`. Source: RFC 8288.
fn next_page(headers: &HeaderMap, from: &Url) -> Option<Url> {
    let links = headers.get_all(LINK).iter().filter_map(|value| value.to_str().ok());
    links.flat_map(|text| text.split(',')).find_map(|link| {
        let (address, parameters) = link.trim().strip_prefix('<')?.split_once('>')?;
        let is_next = parameters.split(';').any(|one| {
            one.trim().strip_prefix("rel=").is_some_and(|rel| rel.trim_matches('"') == "next")
        });
        let url = from.join(address).ok()?;
        // A link to another host does not lead to a list of this registry.
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
