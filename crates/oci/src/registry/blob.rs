//! Readers of blobs, which reconnect after errors.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use reqwest::header::{CONTENT_RANGE, HeaderMap, HeaderValue, RANGE};
use tokio::sync::mpsc;

use super::engine::{Engine, first};
use super::hosts::Capability;
use super::patience::Patience;
use super::retry::Turns;
use super::transport::{Ask, Urgency, take_end};
use super::{Cause, Core, Registry, RegistryError};
use crate::Digest;
use crate::blobs::{AskedPeers, BlobSource, PeerPart, Whole, within};

/// Size of a piece that is passed to the reader, in bytes.
const PIECE: usize = 256 << 10;
/// Number of queued pieces, besides the one that is filled and the one that is read.
const PIECES: usize = 4;
/// Maximum time to fill a piece. Without it, a slow blob would look like a stalled one.
const PIECE_AGE: Duration = Duration::from_millis(200);

/// How parts of a blob are fetched.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartsWay {
    pub(super) whole: Whole,
    pub(super) urgency: Urgency,
}

impl PartsWay {
    /// Also from a source that can only send the whole blob, for a reader.
    pub(super) const USUAL: Self = Self { whole: Whole::Read, urgency: Urgency::Reader };
}

/// A reader of a blob. The first read sends the first request. The caller must verify the digest.
///
/// Errors of reads contain a [`RegistryError`].
pub struct BlobReader {
    engine: Arc<Engine>,
    core: Arc<Core>,
    digest: Digest,
    size: Option<u64>,
    from: u64,
    until: Option<u64>,
    is_document: bool,
    /// The hosts that are asked, and the blob whose layer this is, if this is the uncompressed tar of a layer.
    tar_of: Option<(Vec<usize>, Digest)>,
    pieces: Option<mpsc::Receiver<BodyPart>>,
    piece: Bytes,
    is_done: bool,
}

impl std::fmt::Debug for BlobReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BlobReader({})", self.digest)
    }
}

enum BodyPart {
    Bytes(Bytes),
    End,
    Failed(RegistryError),
}

impl Registry {
    /// Returns a reader of a blob from the byte `from` on. With a `size` in bytes, a blob of another size is an
    /// error.
    #[must_use]
    pub fn blob(&self, digest: &Digest, size: Option<u64>, from: u64) -> BlobReader {
        BlobReader {
            engine: Arc::clone(&self.engine),
            core: Arc::clone(&self.core),
            digest: *digest,
            size,
            from,
            until: None,
            is_document: false,
            tar_of: None,
            pieces: None,
            piece: Bytes::new(),
            is_done: false,
        }
    }
}

impl BlobSource for Registry {
    fn blob(&self, digest: &Digest, size: u64, range: Range<u64>) -> Box<dyn Read + Send + '_> {
        let blob = Self::blob(self, digest, Some(size), range.start);
        Box::new(if range.end < size { blob.until(range.end) } else { blob })
    }

    fn ranges(
        &self,
        digest: &Digest,
        size: u64,
        ranges: &[Range<u64>],
        whole: Whole,
    ) -> io::Result<Vec<Vec<u8>>> {
        within(size, ranges)?;
        let way = PartsWay { whole, urgency: Urgency::Reader };
        self.parts(digest, ranges, way).map_err(io::Error::other)
    }

    fn ranges_in_background(
        &self,
        digest: &Digest,
        size: u64,
        ranges: &[Range<u64>],
        whole: Whole,
    ) -> io::Result<Vec<Vec<u8>>> {
        within(size, ranges)?;
        let way = PartsWay { whole, urgency: Urgency::Background };
        self.parts(digest, ranges, way).map_err(io::Error::other)
    }

    fn tar(&self, blob: &Digest, diff_id: &Digest) -> Option<(Box<dyn Read + Send + '_>, u64)> {
        let found = self.peer_tar(blob, diff_id)?;
        Some((Box::new(found.reader), found.size))
    }

    fn tar_part(
        &self,
        blob: &Digest,
        diff_id: &Digest,
        range: Range<u64>,
        asked: AskedPeers,
    ) -> Option<PeerPart> {
        self.peer_part(blob, diff_id, range, asked)
    }

    fn distrust_peer(&self, blob: &Digest, host: &str) {
        Self::distrust_peer(self, blob, host);
    }

    fn may_have_peers(&self, blob: &Digest) -> bool {
        self.core.may_have_peers(blob)
    }

    fn distrust(&self, digest: &Digest) -> bool {
        Self::distrust(self, digest)
    }
}

impl BlobReader {
    /// Ends the reader before the byte `end`. Later bytes are not requested.
    #[must_use]
    pub fn until(mut self, end: u64) -> Self {
        self.until = Some(end);
        self
    }

    /// Marks the blob as a small document, such as a config: all attempts share [`super::Settings::patience`].
    #[must_use]
    pub fn as_document(mut self) -> Self {
        self.is_document = true;
        self
    }

    /// Makes this the reader of a layer's tar, which only these mirrors are asked for, each once. If `distrust` is
    /// called for `blob`, the mirrors that sent the tar are distrusted for that blob.
    pub(super) fn for_tar_of(mut self, blob: &Digest, hosts: Vec<usize>) -> Self {
        self.tar_of = Some((hosts, *blob));
        self
    }

    fn start(&self) -> mpsc::Receiver<BodyPart> {
        let (sender, receiver) = mpsc::channel(PIECES);
        let core = Arc::clone(&self.core);
        let mut transfer = Transfer {
            core: Arc::clone(&core),
            digest: self.digest,
            size: self.size,
            at: self.from,
            until: self.until,
            is_document: self.is_document,
            tar_of: self.tar_of.clone(),
            is_from_start: false,
            sender: sender.clone(),
        };
        self.engine.spawn(async move {
            let nobody = async {
                first(sender.closed(), core.cancelled()).await;
                None
            };
            // If the call was cancelled or the reader dropped, the result is not sent.
            let Some(result) = first(async { Some(transfer.run().await) }, nobody).await else {
                return;
            };
            let last = match result {
                Ok(()) => BodyPart::End,
                Err(error) => BodyPart::Failed(error),
            };
            // The reader may have been dropped.
            let _sent = sender.send(last).await;
        });
        receiver
    }

    fn cancelled(&self) -> io::Error {
        let what = format!("fetch blob {}", self.digest);
        io::Error::other(RegistryError::new(&what, &self.core.registry, 1, Cause::Cancelled))
    }
}

impl Read for BlobReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.is_done && !buffer.is_empty() {
            if self.core.settings.cancel.load(Ordering::Relaxed) {
                return Err(self.cancelled());
            }
            if self.pieces.is_none() {
                self.pieces = Some(self.start());
            }
            let pieces = self.pieces.as_mut().expect("they were started above");
            match pieces.blocking_recv() {
                Some(BodyPart::Bytes(piece)) => self.piece = piece,
                Some(BodyPart::End) => self.is_done = true,
                Some(BodyPart::Failed(error)) => return Err(io::Error::other(error)),
                None => return Err(self.cancelled()),
            }
        }
        let length = buffer.len().min(self.piece.len());
        buffer[..length].copy_from_slice(&self.piece.split_to(length));
        Ok(length)
    }
}

/// The state of a reader on the network thread.
struct Transfer {
    core: Arc<Core>,
    digest: Digest,
    size: Option<u64>,
    /// Offset of the next byte for the reader, which gets no byte twice.
    at: u64,
    /// Offset at which the reader ends, if it does not read the whole blob.
    until: Option<u64>,
    is_document: bool,
    /// As in [`BlobReader`].
    tar_of: Option<(Vec<usize>, Digest)>,
    /// Whether to request the whole blob and skip the received part, because a server refused a range.
    is_from_start: bool,
    sender: mpsc::Sender<BodyPart>,
}

impl Transfer {
    async fn run(&mut self) -> Result<(), RegistryError> {
        let what = format!("fetch blob {}", self.digest);
        let mut turns = match &self.tar_of {
            Some((hosts, _)) => Turns::new(&self.core, what, hosts.clone()).once(),
            None => self.core.turns(&what, Capability::Pull, Some(&self.digest)),
        };
        while self.end() != Some(self.at) {
            let index = turns.next().await?;
            let before = self.at;
            let attempt = match self.is_document {
                true => turns.attempt(self.attempt(index)).await,
                false => {
                    let patience = Patience::blob(self.core.settings.patience);
                    turns.attempt(patience.during(self.attempt(index))).await
                }
            };
            match attempt {
                Ok(()) => break,
                Err(cause) => {
                    self.core.places.forget(index, &self.digest);
                    // If only a few bytes arrive during a whole attempt, this does not count as progress.
                    if self.at > before && !cause.is_slow() {
                        turns.progressed();
                    }
                    turns.failed(cause);
                }
            }
        }
        Ok(())
    }

    /// Returns the offset at which the reader ends, if it is known.
    fn end(&self) -> Option<u64> {
        self.until.or(self.size)
    }

    async fn attempt(&mut self, index: usize) -> Result<(), Cause> {
        let core = Arc::clone(&self.core);
        let (at, until, is_from_start) = (self.at, self.until, self.is_from_start);
        let prepare = |ask: Ask| {
            if is_from_start || (at == 0 && until.is_none()) {
                return Ok(ask);
            }
            let last = until.map(|end| end.saturating_sub(1));
            Ok(ask.header(RANGE, ranges_header(&[(at, last)])?))
        };
        let answer = core.ask_blob(index, &self.digest, prepare).await?;
        let status = answer.response.status().as_u16();
        let headers = answer.response.headers();
        let mut skip = match status {
            200 => self.at,
            206 => {
                self.check_range(headers)?;
                0
            }
            // The blob is complete, but only the server knew its size.
            416 if self.size.is_none() && total_of_416(headers) == Some(self.at) => return Ok(()),
            416 if !is_from_start && (at > 0 || until.is_some()) => {
                self.is_from_start = true;
                return Err(Cause::Connection(
                    "the server does not resume at an offset".to_owned(),
                ));
            }
            _ => return Err(core.failure(index, answer).await),
        };
        if let (200, Some(expected), Some(actual)) =
            (status, self.size, answer.response.content_length())
            && actual != expected
        {
            return Err(Cause::Length { actual, expected });
        }
        let elsewhere = answer.elsewhere();
        let mut response = answer.response;
        let mut piece = BytesMut::new();
        let mut since = Instant::now();
        loop {
            let chunk = core.transport.chunk(&mut response);
            let next = if piece.is_empty() {
                chunk.await
            } else {
                // Received bytes are passed on soon, even if no more follow.
                let rest = PIECE_AGE.saturating_sub(since.elapsed());
                let Ok(next) = tokio::time::timeout(rest, chunk).await else {
                    self.pass_on(index, piece.split().freeze()).await?;
                    continue;
                };
                next
            };
            let (ended, mut chunk) = match next {
                Ok(Some(chunk)) => (None, chunk),
                Ok(None) => (Some(Ok(())), Bytes::new()),
                Err(cause) => (Some(Err(cause.at(elsewhere.as_deref()))), Bytes::new()),
            };
            let skipped = usize::try_from(skip).unwrap_or(usize::MAX).min(chunk.len());
            drop(chunk.split_to(skipped));
            skip -= skipped as u64;
            if let Some(until) = self.until {
                // A server without ranges sends the whole blob.
                let left = until - self.at - piece.len() as u64;
                chunk.truncate(usize::try_from(left).unwrap_or(usize::MAX));
            }
            let after = self.at + piece.len() as u64 + chunk.len() as u64;
            let ended = ended.or((self.until == Some(after)).then_some(Ok(())));
            if let Some(max) = self.size.filter(|size| after > *size) {
                return Err(Cause::TooLong { max });
            }
            if piece.is_empty() {
                since = Instant::now();
            }
            piece.extend_from_slice(&chunk);
            while piece.len() >= PIECE {
                self.pass_on(index, piece.split_to(PIECE).freeze()).await?;
            }
            if !piece.is_empty() && (ended.is_some() || since.elapsed() > PIECE_AGE) {
                self.pass_on(index, piece.split().freeze()).await?;
            }
            if let Some(result) = ended {
                result?;
                return match self.end() {
                    Some(expected) if self.at < expected => {
                        Err(Cause::Short { actual: self.at, expected })
                    }
                    _ => {
                        take_end(response);
                        Ok(())
                    }
                };
            }
        }
    }

    async fn pass_on(&mut self, index: usize, piece: Bytes) -> Result<(), Cause> {
        let blamed = self.tar_of.as_ref().map_or(self.digest, |it| it.1);
        self.core.served(index, &blamed);
        let length = piece.len() as u64;
        self.sender.send(BodyPart::Bytes(piece)).await.map_err(|_error| Cause::Cancelled)?;
        self.at += length;
        Ok(())
    }

    fn check_range(&self, headers: &HeaderMap) -> Result<(), Cause> {
        let range = ContentRange::from_headers(headers);
        let is_same = range.is_some_and(|range| {
            range.first == self.at
                && self.size.is_none_or(|size| {
                    range.last < size && range.total.is_none_or(|total| total == size)
                })
        });
        if is_same { Ok(()) } else { Err(wrong_range(headers, self.at)) }
    }
}

pub(super) fn wrong_range(headers: &HeaderMap, asked: u64) -> Cause {
    let answer = headers.get(CONTENT_RANGE).map(|value| value.as_bytes()).unwrap_or_default();
    Cause::ContentRange {
        asked,
        answer: String::from_utf8_lossy(answer).chars().take(80).collect(),
    }
}

/// Formats `bytes=FIRST-LAST, FIRST-`.
pub(super) fn ranges_header(ranges: &[(u64, Option<u64>)]) -> Result<HeaderValue, Cause> {
    let parts = ranges.iter().map(|(first, last)| match last {
        Some(last) => format!("{first}-{last}"),
        None => format!("{first}-"),
    });
    let text = format!("bytes={}", parts.collect::<Vec<_>>().join(","));
    HeaderValue::try_from(text).map_err(|error| Cause::Protocol(error.to_string()))
}

/// A header `bytes FIRST-LAST/TOTAL`. Source: RFC 9110, 14.4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ContentRange {
    pub(super) first: u64,
    pub(super) last: u64,
    pub(super) total: Option<u64>,
}

impl ContentRange {
    pub(super) fn from_headers(headers: &HeaderMap) -> Option<Self> {
        Self::parse(headers.get(CONTENT_RANGE)?.to_str().ok()?)
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        let (first, last) = (first.parse().ok()?, last.parse().ok()?);
        let total = match total {
            "*" => None,
            number => Some(number.parse().ok()?),
        };
        let is_sane = first <= last && total.is_none_or(|total| last < total);
        is_sane.then_some(Self { first, last, total })
    }
}

fn total_of_416(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_RANGE)?.to_str().ok()?.trim().strip_prefix("bytes */")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expect: Option<(u64, u64, Option<u64>)>) {
        let got = ContentRange::parse(text).map(|range| (range.first, range.last, range.total));
        assert_eq!(got, expect, "{text}");
    }

    /// The rows are from RFC 9110, 14.4.
    #[test]
    fn content_ranges() {
        check("bytes 42-1233/1234", Some((42, 1233, Some(1234))));
        check("bytes 42-1233/*", Some((42, 1233, None)));
        check("bytes 0-0/1", Some((0, 0, Some(1))));
        check("bytes */1234", None);
        check("bytes 42-41/1234", None);
        check("bytes 0-1234/1234", None);
        check("bytes 0-/9", None);
        check("items 0-1/9", None);
        check("", None);
    }
}
