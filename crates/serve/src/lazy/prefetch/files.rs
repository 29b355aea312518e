//! Finds the part of a file that is worth prefetching after a read.
//!
//! A program that has begun to read a library or a module soon reads more of the file: first the header, then the end,
//! then the rest.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Largest size of a file, in bytes, that is prefetched as a whole.
const WHOLE_MAX: u64 = 8 << 20;
/// Size of the parts in which a larger file is prefetched, in bytes. Parts begin at multiples of this size.
const PART: u64 = 2 << 20;

/// Returns the byte ranges of files in a device, in order of their offsets.
type FindFiles<'a> = Box<dyn Fn() -> Vec<Range<u64>> + Send + Sync + 'a>;

/// The files of a device. Finding the files takes some milliseconds, so readers do not wait for this.
#[derive(Default)]
pub(in crate::lazy) struct DeviceFiles<'a> {
    find: Option<FindFiles<'a>>,
    is_begun: AtomicBool,
    found: OnceLock<Vec<Range<u64>>>,
}

impl<'a> DeviceFiles<'a> {
    pub(in crate::lazy) fn new(find: impl Fn() -> Vec<Range<u64>> + Send + Sync + 'a) -> Self {
        Self { find: Some(Box::new(find)), ..Self::default() }
    }

    /// Returns whether the caller has to find the files: it can be done, and has not begun.
    pub(in crate::lazy) fn begin(&self) -> bool {
        self.find.is_some() && !self.is_begun.swap(true, Ordering::Relaxed)
    }

    pub(in crate::lazy) fn locate_all(&self) {
        if let Some(find) = &self.find {
            self.found.get_or_init(find);
        }
    }

    /// Returns the range that is worth prefetching after a read of the device, or `None` while the files are unknown.
    pub(in crate::lazy) fn around(&self, read: &Range<u64>) -> Option<Range<u64>> {
        around(self.found.get()?, read)
    }
}

fn around(files: &[Range<u64>], read: &Range<u64>) -> Option<Range<u64>> {
    let first = files.partition_point(|it| it.end <= read.start);
    let touched = files[first..].iter().take_while(|it| it.start < read.end);
    // A read belongs to a single file, but its pages may also contain the edges of neighbouring files.
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
        files.locate_all();
        files.locate_all();
        assert_eq!(files.around(&(1..2)), Some(0..100));
        let none = DeviceFiles::default();
        none.locate_all();
        assert!(!none.begin() && none.around(&(1..2)).is_none());
    }
}
