//! Tests the memory that a large tree takes. It has its own test program, because it measures the whole process.

#![expect(clippy::unwrap_used, reason = "helpers of tests, which clippy does not see as tests")]

// The name that other crates use for this crate.
extern crate quire_image as image;

use image::erofs::{Profile, Versions, write};
use image::tree::{Builder, Content, InodeId, Link, Location, Metadata, Node, Timestamp};
use image::verity::ObjectId;

const ENTRIES: usize = 1_000_000;
const BYTES_PER_ENTRY: usize = 150;
/// Maximum bytes per entry while an image is written, besides the tree.
const BYTES_PER_ENTRY_WRITTEN: usize = 48;

/// A pseudo-random number generator, xorshift64. Source: Marsaglia, "Xorshift RNGs", 2003.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % u64::try_from(bound).unwrap()).unwrap()
    }
}

/// Returns a field of `/proc/self/status` in bytes.
fn status(field: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    let kilobytes: usize = line.trim_matches([':', '\t', ' ', 'k', 'B']).parse().unwrap();
    kilobytes * 1024
}

/// Makes a tree with the proportions of a distribution's root file system: an eighth are directories, a fourteenth
/// symlinks, and the rest files, nearly all with separate objects. Each inode has one of a hundred SELinux labels.
/// Names have 18 bytes, and two thirds of them are unique.
fn build() -> Builder {
    let mut random = Random(1);
    let mut builder = Builder::new();
    let labels: Vec<_> = (0..100)
        .map(|number| {
            let label = format!("system_u:object_r:type_{number}_t:s0\0");
            let pair = (b"security.selinux".as_slice(), label.as_bytes());
            builder.xattrs([pair]).unwrap()
        })
        .collect();
    let mut directories = vec![InodeId::ROOT];
    for number in 0..ENTRIES {
        let seconds = i64::try_from(1_600_000_000 + random.below(1 << 20)).unwrap();
        let mtime = Timestamp { seconds, nanoseconds: 0 };
        let metadata = Metadata { permissions: 0o644, mtime, ..Metadata::IMPLICIT };
        let digest = [(); 32].map(|()| u8::try_from(random.below(256)).unwrap());
        let unique = if number % 3 == 0 { number % 1000 } else { number };
        let name = format!("name-{unique:08}.file");
        let target = format!("../lib/name-{unique:08}.file");
        let node = match number % 100 {
            0..=12 => Node::Directory,
            13..=19 => Node::Symlink(target.as_bytes()),
            20..=22 => Node::Regular(Content::Inline(b"")),
            _ => Node::Regular(Content::External {
                size: 1 + u64::try_from(number).unwrap(),
                object: Some(ObjectId::from_bytes(&digest).unwrap()),
                location: Location::Object,
            }),
        };
        let label = labels[random.below(labels.len())];
        let inode = builder.inode(&metadata, label, node).unwrap();
        let recent = directories.len().min(100);
        let parent = directories[directories.len() - 1 - random.below(recent)];
        // A repeated name may already exist in the directory.
        if builder.insert(parent, name.as_bytes(), inode, Link::Owner).is_err() {
            let name = format!("{name}-{number}");
            builder.insert(parent, name.as_bytes(), inode, Link::Owner).unwrap();
        }
        if node == Node::Directory {
            directories.push(inode);
        }
    }
    builder
}

#[test]
fn a_million_entries_take_less_than_150_bytes_each() {
    let before = status("VmRSS");
    let tree = build().finish();
    let resident = status("VmRSS") - before;
    let peak = status("VmHWM") - before;
    assert_eq!(tree.inode_count(), ENTRIES + 1);
    println!(
        "an entry: {} bytes by account, {} resident, {} at the peak of making it",
        tree.heap_bytes() / ENTRIES,
        resident / ENTRIES,
        peak / ENTRIES,
    );
    assert!(tree.heap_bytes() < ENTRIES * BYTES_PER_ENTRY, "{} bytes", tree.heap_bytes());
    assert!(resident < ENTRIES * BYTES_PER_ENTRY, "{resident} bytes resident");
    assert!(peak < ENTRIES * BYTES_PER_ENTRY, "{peak} bytes resident at the peak");

    // Reset the peak. Source: proc(5), "clear_refs".
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status("VmRSS");
    let profile = Profile::Composefs(Versions::default());
    let summary = write(&tree, &profile, &mut std::io::sink()).unwrap();
    let peak = status("VmHWM") - before;
    println!("{} bytes written, {} an entry at the peak of it", summary.bytes, peak / ENTRIES);
    assert!(summary.bytes > 100 << 20, "{} bytes", summary.bytes);
    assert!(peak < ENTRIES * BYTES_PER_ENTRY_WRITTEN, "{peak} bytes resident while writing");
}
