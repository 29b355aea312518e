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
const PAGES_MAX: usize = 500;

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
        let mut pages = 0;
        while let Some(ask) = next.take() {
            pages = count_page(pages)?;
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
        let following = next_page(&headers, &ask.url)?;
        let bytes = self.transport.body(answer.response, MANIFEST_MAX).await?;
        check_json("a list", &bytes, &headers)?;
        let page = serde_json::from_slice(&bytes)
            .map_err(|source| Cause::Document(ManifestError::Json { kind: "list", source }))?;
        let following = following.map(|url| Ask { url, ..ask });
        Ok(Some((page, following)))
    }
}

pub(super) fn unavailable() -> Cause {
    Cause::NotFound { words: String::new() }
}

pub(super) fn too_many(what: &'static str, count: usize, max: usize) -> Cause {
    Cause::Document(ManifestError::TooMany { what, count, max })
}

/// Counts one more page of a list. A list with more pages is refused, because a part of it would look complete.
pub(super) fn count_page(pages: usize) -> Result<usize, Cause> {
    if pages < PAGES_MAX { Ok(pages + 1) } else { Err(too_many("pages", pages + 1, PAGES_MAX)) }
}

/// Returns the address in `<ADDRESS>; rel="next"`. Source: RFC 8288.
fn next_page(headers: &HeaderMap, from: &Url) -> Result<Option<Url>, Cause> {
    let mut next = None;
    for value in headers.get_all(LINK) {
        // A link that cannot be read may continue the list, and a part of the list would look complete.
        let unreadable = |why: &str| {
            let link = value.as_bytes().escape_ascii();
            Cause::Protocol(format!("the header `Link: {link}` {why}"))
        };
        let link = value.to_str().map_err(|_other| unreadable("has bytes other than ASCII"))?;
        match links_of(link).find(|(_, parameters)| is_next(parameters)) {
            Some((address, _)) => next = next.or(Some(address)),
            None if is_next(link) => return Err(unreadable("has no address in `<` and `>`")),
            None => {}
        }
    }
    let next = next.map(|address| from.join(address)).transpose();
    let next = next.map_err(|error| {
        Cause::Protocol(format!("the list continues at an address that is not valid: {error}"))
    })?;
    match next {
        Some(url) if url.origin() == from.origin() => Ok(Some(url)),
        // A registry behind a proxy that terminates TLS often reports its own scheme and port as those of clients.
        Some(url) if url.host_str() == from.host_str() => {
            let mut here = from.clone();
            here.set_path(url.path());
            here.set_query(url.query());
            Ok(Some(here))
        }
        // This is an error, because the credentials are only for this registry, and a partial list would look
        // complete.
        Some(url) => {
            let host = url.host_str().unwrap_or_default();
            Err(Cause::Protocol(format!("the list continues at another host, {host}")))
        }
        None => Ok(None),
    }
}

/// Returns the address and the parameters of each link in a header. An address may have commas.
fn links_of(header: &str) -> impl Iterator<Item = (&str, &str)> {
    header.split('<').skip(1).filter_map(|link| link.split_once('>'))
}

/// Returns whether the parameters of a link have the relation `next`, maybe among others.
fn is_next(parameters: &str) -> bool {
    let mut pairs = parameters.split([';', ',']).filter_map(|it| it.split_once('='));
    pairs.any(|(name, value)| {
        let mut words = value.trim().trim_matches('"').split_ascii_whitespace();
        name.trim().eq_ignore_ascii_case("rel") && words.any(|it| it.eq_ignore_ascii_case("next"))
    })
}

#[cfg(test)]
mod tests {
    use reqwest::header::HeaderValue;

    use super::*;

    fn check(link: &str, expect: Result<Option<&str>, &str>) {
        let mut headers = HeaderMap::new();
        headers.insert(LINK, HeaderValue::from_bytes(link.as_bytes()).unwrap());
        let from = Url::parse("https://a.io/v2/x/tags/list?n=2").unwrap();
        let next = next_page(&headers, &from).map_err(|cause| cause.to_string());
        let next = next.map(|url| url.map(String::from));
        assert_eq!(next.as_ref().map(Option::as_deref).map_err(|it| &**it), expect, "{link}");
    }

    #[test]
    fn pages() {
        let next = Ok(Some("https://a.io/v2/x/tags/list?last=b&n=2"));
        check("</v2/x/tags/list?last=b&n=2>; rel=\"next\"", next);
        check("<list?last=b&n=2>;rel=next", next);
        check("</first>; rel=\"first\", <list?last=b&n=2>; rel=\"next\"", next);
        check("<http://a.io/v2/x/tags/list?last=b&n=2>; rel=\"next\"", next);
        check("<http://a.io:5000/v2/x/tags/list?last=b&n=2>; rel=\"next\"", next);
        check(
            "<https://b.io/v2/x/tags/list>; rel=\"next\"",
            Err("the server's response is not valid: the list continues at another host, b.io"),
        );
        check("<https://b.io/>; rel=\"prev\"", Ok(None));
        check("</v2/x>; rel=\"prev\"", Ok(None));
        let comma = Ok(Some("https://a.io/v2/x/tags/list?last=a,b"));
        check("</v2/x/tags/list?last=a,b>; REL = \"last Next\"", comma);
        check("</v2/x>; rel=prev, </v2/x/tags/list?last=a,b>;rel=next", comma);
        check(
            "<https://[>; rel=next",
            Err(
                "the server's response is not valid: the list continues at an address that is not valid: invalid IPv6 address",
            ),
        );
        check("x", Ok(None));
        let wrong = |link: &str, why: &str| {
            let text =
                format!("the server's response is not valid: the header `Link: {link}` {why}");
            text.leak()
        };
        let ascii = |link: &str| wrong(link, "has bytes other than ASCII");
        check("</v2/x?last=\u{e9}>; rel=next", Err(ascii(r"</v2/x?last=\xc3\xa9>; rel=next")));
        check("</v2/x>; rel=prev; title=\u{e9}", Err(ascii(r"</v2/x>; rel=prev; title=\xc3\xa9")));
        for link in ["/v2/x?last=b; rel=next", "</v2/x?last=b; rel=next"] {
            check(link, Err(wrong(link, "has no address in `<` and `>`")));
        }
    }
}
