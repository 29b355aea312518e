//! Fetches parts of blobs: single ranges, and several in one response.

use std::ops::Range;
use std::sync::Arc;

use reqwest::header::{CONTENT_TYPE, HeaderMap, RANGE};
use tokio::task::JoinSet;

use super::blob::{ContentRange, PartsWay, ranges_header, wrong_range};
use super::hosts::Capability;
use super::patience::Patience;
use super::transport::{Answer, Ask, Urgency, take_end};
use super::{Cause, Core, Registry, RegistryError, lock};
use crate::Digest;
use crate::blobs::Whole;

/// Maximum number of ranges in a request. More would exceed the header size that servers accept.
const RANGES_MAX: usize = 64;
/// Number of parallel requests to a host that accepts only one range per request.
const PARALLEL: usize = 4;
/// Maximum size of the header of each part in a multipart response, in bytes.
const PART_HEAD_MAX: u64 = 1024;

impl Registry {
    /// Fetches a part of a blob. The caller cannot verify it with the blob's digest.
    ///
    /// # Errors
    /// [`RegistryError`] if the part cannot be fetched.
    pub fn range(&self, digest: &Digest, range: Range<u64>) -> Result<Vec<u8>, RegistryError> {
        let digest = *digest;
        self.run(&format!("fetch a part of blob {digest}"), |core| {
            core.range(digest, range, PartsWay::USUAL)
        })
    }

    /// Fetches parts of a blob into memory, in the given order: with one request if the host supports several ranges,
    /// else with a few parallel requests.
    ///
    /// # Errors
    /// [`RegistryError`] if a part cannot be fetched.
    pub fn ranges(
        &self,
        digest: &Digest,
        ranges: &[Range<u64>],
    ) -> Result<Vec<Vec<u8>>, RegistryError> {
        self.parts(digest, ranges, PartsWay::USUAL)
    }

    pub(super) fn parts(
        &self,
        digest: &Digest,
        ranges: &[Range<u64>],
        way: PartsWay,
    ) -> Result<Vec<Vec<u8>>, RegistryError> {
        let (digest, ranges) = (*digest, ranges.to_vec());
        self.run(&format!("fetch parts of blob {digest}"), |core| async move {
            let mut all = Vec::with_capacity(ranges.len());
            for some in ranges.chunks(RANGES_MAX) {
                all.append(&mut core.some_ranges(&digest, some.to_vec(), way).await?);
            }
            Ok(all)
        })
    }
}

impl Core {
    async fn range(
        self: Arc<Self>,
        digest: Digest,
        range: Range<u64>,
        way: PartsWay,
    ) -> Result<Vec<u8>, RegistryError> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let what = format!("fetch bytes {} to {} of blob {digest}", range.start, range.end);
        let mut turns = self.turns(&what, Capability::Pull, Some(&digest));
        loop {
            let index = turns.next().await?;
            let patience = Patience::blob(self.settings.patience);
            match turns.attempt(patience.during(self.one_range(index, &digest, &range, way))).await
            {
                Ok(bytes) => return Ok(bytes),
                Err(cause) => {
                    self.places.forget(index, &digest);
                    turns.failed(cause);
                }
            }
        }
    }

    /// Requests parts of a blob, or the whole blob if `ranges` is empty.
    async fn ask_ranges(
        &self,
        index: usize,
        digest: &Digest,
        ranges: &[Range<u64>],
        urgency: Urgency,
    ) -> Result<Answer, Cause> {
        let bounds: Vec<_> =
            ranges.iter().map(|range| (range.start, Some(range.end - 1))).collect();
        let prepare = |ask: Ask| {
            let ask = Ask { urgency, ..ask };
            match bounds.is_empty() {
                true => Ok(ask),
                false => Ok(ask.header(RANGE, ranges_header(&bounds)?)),
            }
        };
        let answer = self.ask_blob(index, digest, prepare).await?;
        match answer.response.status().as_u16() {
            200 | 206 => {
                self.served(index, digest);
                Ok(answer)
            }
            _ => Err(self.failure(index, answer).await),
        }
    }

    pub(super) async fn one_range(
        &self,
        index: usize,
        digest: &Digest,
        range: &Range<u64>,
        way: PartsWay,
    ) -> Result<Vec<u8>, Cause> {
        let PartsWay { whole, urgency } = way;
        let asked = std::slice::from_ref(range);
        let answer = match self.ask_ranges(index, digest, asked, urgency).await {
            // The server does not support ranges.
            Err(Cause::Status { status: 416, .. }) if whole == Whole::Read => {
                self.ask_ranges(index, digest, &[], urgency).await?
            }
            answer => answer?,
        };
        // A range that is the whole blob may come with status 200.
        let is_all =
            range.start == 0 && answer.response.content_length().is_some_and(|it| it == range.end);
        if whole == Whole::Refuse && answer.response.status().as_u16() != 206 && !is_all {
            return Err(wrong_range(answer.response.headers(), range.start));
        }
        self.read_range(answer, range).await
    }

    /// Reads the bytes of `range` from a response that contains either the range or the whole blob.
    async fn read_range(&self, answer: Answer, range: &Range<u64>) -> Result<Vec<u8>, Cause> {
        let mut response = answer.response;
        let mut skip = range.start;
        if response.status().as_u16() == 206 {
            let headers = response.headers();
            let found = ContentRange::from_headers(headers);
            if found.is_none_or(|found| found.first != range.start || found.last + 1 != range.end) {
                return Err(wrong_range(headers, range.start));
            }
            skip = 0;
        }
        let length = range.end - range.start;
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < length {
            let Some(mut chunk) = self.transport.chunk(&mut response).await? else {
                return Err(Cause::Short { actual: bytes.len() as u64, expected: length });
            };
            let skipped = usize::try_from(skip).unwrap_or(usize::MAX).min(chunk.len());
            drop(chunk.split_to(skipped));
            skip -= skipped as u64;
            let missing = usize::try_from(length - bytes.len() as u64).unwrap_or(usize::MAX);
            bytes.extend_from_slice(&chunk[..chunk.len().min(missing)]);
        }
        take_end(response);
        Ok(bytes)
    }

    async fn some_ranges(
        self: &Arc<Self>,
        digest: &Digest,
        ranges: Vec<Range<u64>>,
        way: PartsWay,
    ) -> Result<Vec<Vec<u8>>, RegistryError> {
        let real: Vec<_> = ranges.iter().filter(|range| !range.is_empty()).cloned().collect();
        let first = self.order(Capability::Pull, Some(digest)).first().copied();
        if let (Some(index), true) = (first, real.len() > 1)
            && !lock(&self.single_range).contains(&index)
        {
            let patience = Patience::blob(self.settings.patience);
            match patience.during(self.in_one_answer(index, digest, &real, way.urgency)).await {
                Ok(Some(parts)) => {
                    let mut parts = parts.into_iter();
                    let of = |range: &Range<u64>| match range.is_empty() {
                        true => Vec::new(),
                        false => parts.next().unwrap_or_default(),
                    };
                    return Ok(ranges.iter().map(of).collect());
                }
                Ok(None) => {
                    lock(&self.single_range).insert(index);
                }
                // Single requests are retried, with the full time limit.
                Err(cause) => {
                    self.places.forget(index, digest);
                    tracing::debug!(cause = %cause, "a request for several ranges failed");
                }
            }
        }
        let mut parts: Vec<Vec<u8>> = vec![Vec::new(); ranges.len()];
        let mut rest = ranges.into_iter().enumerate();
        let mut tasks = JoinSet::new();
        loop {
            while tasks.len() < PARALLEL {
                let Some((number, range)) = rest.next() else { break };
                let work = Arc::clone(self).range(*digest, range, way);
                tasks.spawn(async move { (number, work.await) });
            }
            match tasks.join_next().await {
                None => return Ok(parts),
                Some(Ok((number, result))) => parts[number] = result?,
                Some(Err(error)) => {
                    let cause = Cause::Protocol(error.to_string());
                    return Err(RegistryError::new(
                        "fetch parts of a blob",
                        &self.registry,
                        1,
                        cause,
                    ));
                }
            }
        }
    }

    /// Fetches several ranges with one request. `None` if the host does not support that.
    async fn in_one_answer(
        &self,
        index: usize,
        digest: &Digest,
        ranges: &[Range<u64>],
        urgency: Urgency,
    ) -> Result<Option<Vec<Vec<u8>>>, Cause> {
        let answer = match self.ask_ranges(index, digest, ranges, urgency).await {
            Ok(answer) => answer,
            Err(Cause::Status { status: 400 | 416 | 501, .. }) => return Ok(None),
            Err(cause) => return Err(cause),
        };
        let boundary = boundary(answer.response.headers());
        let (206, Some(boundary)) = (answer.response.status().as_u16(), boundary) else {
            return Ok(None);
        };
        let wanted: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let max = wanted.saturating_add((ranges.len() as u64 + 1) * PART_HEAD_MAX);
        let body = self.transport.body(answer.response, max).await?;
        Ok(parts(&body, &boundary, ranges))
    }
}

/// Parses `multipart/byteranges; boundary=…`.
fn boundary(headers: &HeaderMap) -> Option<String> {
    let text = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    let (kind, parameters) = text.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/byteranges") {
        return None;
    }
    let value = parameters.split(';').find_map(|one| one.trim().strip_prefix("boundary="))?;
    Some(value.trim_matches('"').to_owned()).filter(|value| !value.is_empty())
}

/// Returns the parts of a response in the order of `ranges`, if none is missing. Source: RFC 9110, 14.6, and RFC
/// 2046, 5.1.
fn parts(body: &[u8], boundary: &str, ranges: &[Range<u64>]) -> Option<Vec<Vec<u8>>> {
    let delimiter = format!("--{boundary}");
    let mut found: Vec<Option<Vec<u8>>> = vec![None; ranges.len()];
    let mut rest = body;
    loop {
        let at = position_of(rest, delimiter.as_bytes())?;
        rest = &rest[at + delimiter.len()..];
        if rest.starts_with(b"--") {
            return found.into_iter().collect();
        }
        let end = position_of(rest, b"\r\n\r\n")?;
        let head = std::str::from_utf8(&rest[..end]).ok()?;
        let range = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.trim().eq_ignore_ascii_case("content-range").then_some(value)
        });
        let range = ContentRange::parse(range?)?;
        // The length decides where content ends, because content may contain the delimiter.
        let length = usize::try_from(range.last.checked_sub(range.first)?.checked_add(1)?).ok()?;
        let content = rest.get(end + 4..)?;
        let bytes = content.get(..length)?;
        rest = content.get(length..)?.strip_prefix(b"\r\n")?;
        for (place, wanted) in found.iter_mut().zip(ranges) {
            if wanted.start == range.first && wanted.end == range.last + 1 {
                *place = Some(bytes.to_vec());
            }
        }
    }
}

fn position_of(text: &[u8], pattern: &[u8]) -> Option<usize> {
    text.windows(pattern.len()).position(|window| window == pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of RFC 9110, 14.6, with content.
    const ANSWER: &str = "\r\n--SEP\r\nContent-Type: x\r\nContent-Range: bytes 5-7/20\r\n\r\nab\n\r\n\
        --SEP\r\ncontent-range: bytes 10-14/20\r\n\r\n--SEP\r\n--SEP--\r\n";

    fn check(body: &str, ranges: &[(u64, u64)], expect: Option<&[&str]>) {
        let ranges: Vec<_> = ranges.iter().map(|(start, end)| *start..*end).collect();
        let got = parts(body.as_bytes(), "SEP", &ranges);
        let expect =
            expect.map(|parts| parts.iter().map(|part| part.as_bytes().to_vec()).collect());
        assert_eq!(got, expect, "{body} {ranges:?}");
    }

    #[test]
    fn answers_of_several_parts() {
        check(ANSWER, &[(5, 8), (10, 15)], Some(&["ab\n", "--SEP"]));
        check(ANSWER, &[(10, 15), (5, 8)], Some(&["--SEP", "ab\n"]));
        check(ANSWER, &[(5, 8)], Some(&["ab\n"]));
        check(ANSWER, &[(5, 9)], None);
        check(&ANSWER.replace("10-14", "10-13"), &[(5, 8)], None);
        check(&ANSWER.replace("10-14", "10-99999999999"), &[(5, 8)], None);
        check(&ANSWER.replace("10-14", "14-10"), &[(5, 8)], None);
        check(&ANSWER.replace("--SEP--", ""), &[(5, 8)], None);
        check("", &[(5, 8)], None);
    }

    #[test]
    fn boundaries() {
        for (text, expect) in [
            ("multipart/byteranges; boundary=SEP", Some("SEP")),
            ("Multipart/ByteRanges; charset=x; boundary=\"S E\"", Some("S E")),
            ("multipart/byteranges", None),
            ("text/plain; boundary=SEP", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_TYPE, text.parse().unwrap());
            assert_eq!(boundary(&headers).as_deref(), expect, "{text}");
        }
    }
}
