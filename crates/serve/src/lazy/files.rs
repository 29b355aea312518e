//! Where a device's files are, and what of a file is worth bringing once a part of it is read.
//!
//! A program that has begun to read a library or a module reads more of it soon: first its header, then its end, then the rest.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// A file of at most so many bytes is brought as a whole.
const WHOLE_MAX: u64 = 8 << 20;
/// Of a larger one, the part around the read that begins at a multiple of this many bytes of the file.
const PART: u64 = 2 << 20;

/// Finds out where a device's files are, in bytes and in their order.
type FindFiles<'a> = Box<dyn Fn() -> Vec<Range<u64>> + Send + Sync + 'a>;

/// The files of a device. That takes some milliseconds, so no reader waits for it.
#[derive(Default)]
pub(super) struct DeviceFiles<'a> {
    find: Option<FindFiles<'a>>,
    is_begun: AtomicBool,
    found: OnceLock<Vec<Range<u64>>>,
}

impl<'a> DeviceFiles<'a> {
    pub(super) fn new(find: impl Fn() -> Vec<Range<u64>> + Send + Sync + 'a) -> Self {
        Self { find: Some(Box::new(find)), ..Self::default() }
    }

    /// Whether they can be found, and nobody has begun to: who asks has to.
    pub(super) fn begin(&self) -> bool {
        self.find.is_some() && !self.is_begun.swap(true, Ordering::Relaxed)
    }

    /// Finds them.
    pub(super) fn find(&self) {
        if let Some(find) = &self.find {
            self.found.get_or_init(find);
        }
    }

    /// What is worth bringing once these bytes of the device are read; nothing as long as the files are unknown.
    pub(super) fn around(&self, read: &Range<u64>) -> Option<Range<u64>> {
        around(self.found.get()?, read)
    }
}

fn around(files: &[Range<u64>], read: &Range<u64>) -> Option<Range<u64>> {
    let first = files.partition_point(|it| it.end <= read.start);
    let touched = files[first..].iter().take_while(|it| it.start < read.end);
    // A read is one of a single file, but for the edges of its pages.
    let common = |it: &&Range<u64>| it.end.min(read.end) - it.start.max(read.start);
    let file = touched.max_by_key(common)?;
    if file.end - file.start <= WHOLE_MAX {
        return Some(file.clone());
    }
    let start = file.start + (read.start.max(file.start) - file.start) / PART * PART;
    Some(start..start.saturating_add(PART).min(file.end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_files_come_as_a_whole_and_large_ones_in_parts() {
        const MB: u64 = 1 << 20;
        let files = [512..1000, 1024..5000, 2 * MB..10 * MB, 11 * MB..20 * MB];
        let check = |read: Range<u64>, expect: Option<Range<u64>>| {
            assert_eq!(around(&files, &read), expect, "{read:?}");
        };
        check(0..512, None);
        check(0..700, Some(512..1000));
        check(900..1100, Some(512..1000));
        check(900..4096, Some(1024..5000));
        check(6000..7000, None);
        check(3 * MB..3 * MB + 1, Some(2 * MB..10 * MB));
        check(10 * MB..11 * MB, None);
        check(11 * MB..11 * MB + 9, Some(11 * MB..13 * MB));
        check(10 * MB..11 * MB + 9, Some(11 * MB..13 * MB));
        check(15 * MB + 5..15 * MB + 9, Some(15 * MB..17 * MB));
        check(19 * MB + 5..40 * MB, Some(19 * MB..20 * MB));
        check(20 * MB..40 * MB, None);
        assert_eq!(around(&[], &(0..1)), None);
    }

    #[test]
    fn they_are_found_once() {
        let is_found = AtomicBool::new(false);
        let files = DeviceFiles::new(|| {
            assert!(!is_found.swap(true, Ordering::Relaxed));
            std::iter::once(0..100).collect()
        });
        assert!(files.around(&(1..2)).is_none());
        assert!(files.begin() && !files.begin());
        assert!(files.around(&(1..2)).is_none());
        files.find();
        files.find();
        assert_eq!(files.around(&(1..2)), Some(0..100));
        let none = DeviceFiles::default();
        none.find();
        assert!(!none.begin() && none.around(&(1..2)).is_none());
    }
}
