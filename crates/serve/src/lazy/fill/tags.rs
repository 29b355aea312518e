//! Recognizes bytes of verified units that are read again, by tags of their blocks.

use std::ops::Range;
use std::sync::{LazyLock, OnceLock};

use image::lazy::UNIT;
use image::lazy::tag::{KEY, TAGGED, TAGS, TagKey};
use rustix::rand::{GetRandomFlags, getrandom};

use super::LayerFiller;

/// The key of this process. Without random numbers, there are no tags, and whole units are compared with their digests.
static TAG_KEY: LazyLock<Option<TagKey>> = LazyLock::new(|| {
    let mut random = [0; KEY];
    let mut rest = &mut random[..];
    while !rest.is_empty() {
        match getrandom(&mut *rest, GetRandomFlags::empty()) {
            Ok(length) => rest = rest.get_mut(length..)?,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
    }
    Some(TagKey::new(&random))
});

/// The tags of a unit, once it was verified.
#[derive(Debug, Default)]
pub(super) struct UnitTags(OnceLock<Box<[u64; TAGS]>>);

impl LayerFiller<'_> {
    /// Records the tags of a unit, whose bytes were just compared with its digest. A unit gets them before it counts as
    /// filled, and its bytes never change afterwards.
    pub(super) fn tag(&self, unit: usize, bytes: &[u8]) {
        if let (Some(key), Some(tags)) = (TAG_KEY.as_ref(), self.core.tags.get(unit)) {
            tags.0.get_or_init(|| Box::new(key.tags(bytes)));
        }
    }

    fn tags(&self, unit: usize) -> Option<&[u64; TAGS]> {
        Some(self.core.tags.get(unit).filter(|_| self.is_there(unit))?.0.get()?)
    }

    /// Returns whether parts of a unit can be verified by tags.
    pub(super) fn has_tags(&self, unit: usize) -> bool {
        self.tags(unit).is_some()
    }

    /// Compares the bytes of a part of a unit with their tags. Returns `None` if the unit has no tags, or if the part
    /// does not consist of whole blocks.
    pub(super) fn have_tags(&self, unit: usize, part: &Range<u64>, bytes: &[u8]) -> Option<bool> {
        let (key, tags) = (TAG_KEY.as_ref()?, self.tags(unit)?);
        let length = self.index.head.device_bytes;
        let is_whole = part.start.is_multiple_of(TAGGED)
            && (part.end.is_multiple_of(TAGGED) || part.end == length);
        if !is_whole || Some(bytes.len()) != usize::try_from(part.end - part.start).ok() {
            return None;
        }
        let first = usize::try_from((part.start - unit as u64 * UNIT) / TAGGED).ok()?;
        let mut blocks = bytes.chunks(usize::try_from(TAGGED).ok()?).zip(tags.get(first..)?);
        Some(blocks.all(|(block, tag)| key.tag(block) == *tag))
    }
}
