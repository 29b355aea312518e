//! Tables that are laid out by hand, from the document.

#![expect(clippy::cast_possible_truncation, reason = "the numbers of these tables are small")]

use super::*;

/// GUIDs as tables contain them: the root of amd64 and of arm64, and Linux data. Source: Discoverable Partitions
/// Specification; `4F68BCE3-E8CD-4DB1-96E7-FBCAF984B709` begins with the bytes e3 bc 68 4f cd e8 b1 4d.
const AMD64: [u8; 16] = [
    0xe3, 0xbc, 0x68, 0x4f, 0xcd, 0xe8, 0xb1, 0x4d, 0x96, 0xe7, 0xfb, 0xca, 0xf9, 0x84, 0xb7, 0x09,
];
const ARM64: [u8; 16] = [
    0x45, 0xb0, 0x21, 0xb9, 0xf0, 0x1d, 0xc3, 0x41, 0xaf, 0x44, 0x4c, 0x6f, 0x28, 0x0d, 0x3f, 0xae,
];
const DATA: [u8; 16] = [7; 16];

struct Laid {
    sector: u64,
    /// Type, first and last sector, and whether there is EROFS.
    partitions: Vec<([u8; 16], u64, u64, bool)>,
    entry: usize,
}

impl Laid {
    fn new(partitions: &[([u8; 16], u64, u64, bool)]) -> Self {
        Self { sector: 512, partitions: partitions.to_vec(), entry: 128 }
    }

    fn disk(&self) -> Vec<u8> {
        let Self { sector, partitions, entry } = self;
        let sector = *sector as usize;
        let mut disk = vec![0; 400 * sector];
        let mut entries = vec![0; 128 * entry];
        for (at, (kind, first, last, has_erofs)) in partitions.iter().enumerate() {
            let raw = &mut entries[at * entry..][..*entry];
            raw[..16].copy_from_slice(kind);
            raw[16..32].fill(9);
            raw[32..40].copy_from_slice(&first.to_le_bytes());
            raw[40..48].copy_from_slice(&last.to_le_bytes());
            raw[56] = b'p';
            raw[58] = b'0' + at as u8;
            let start = *first as usize * sector + 1024;
            if *has_erofs && start + 4 <= disk.len() {
                disk[start..start + 4].copy_from_slice(&SUPERBLOCK_MAGIC.to_le_bytes());
            }
        }
        let sectors = entries.len().div_ceil(sector) as u64;
        let last = 399_u64;
        for (own, table) in [(1, 2), (last, last - sectors)] {
            let at = table as usize * sector;
            disk[at..at + entries.len()].copy_from_slice(&entries);
            let mut header = vec![0; HEADER];
            header[..8].copy_from_slice(SIGNATURE);
            header[8..12].copy_from_slice(&0x10000_u32.to_le_bytes());
            header[12..16].copy_from_slice(&(HEADER as u32).to_le_bytes());
            header[24..32].copy_from_slice(&u64::to_le_bytes(own));
            header[72..80].copy_from_slice(&u64::to_le_bytes(table));
            header[80..84].copy_from_slice(&128_u32.to_le_bytes());
            header[84..88].copy_from_slice(&(*entry as u32).to_le_bytes());
            header[88..92].copy_from_slice(&checksum(&entries).to_le_bytes());
            let sum = checksum(&header);
            header[16..20].copy_from_slice(&sum.to_le_bytes());
            let at = own as usize * sector;
            disk[at..at + HEADER].copy_from_slice(&header);
        }
        disk
    }
}

fn check(disk: &[u8], expect: Result<Range<u64>, &str>) {
    let found = root(&disk, "amd64").map(|it| it.bytes).map_err(|error| error.to_string());
    assert_eq!(found, expect.map_err(str::to_owned));
}

#[test]
fn the_root_is_chosen_by_its_type_or_as_the_only_erofs() {
    let sectors = |first: u64, last: u64| Ok(first * 512..(last + 1) * 512);
    check(&Laid::new(&[(AMD64, 40, 49, true)]).disk(), sectors(40, 49));
    let two = [(ARM64, 40, 49, true), (DATA, 50, 59, false), (AMD64, 60, 69, false)];
    check(&Laid::new(&two).disk(), sectors(60, 69));
    check(&Laid::new(&two[..2]).disk(), sectors(40, 49));
    let large = Laid { sector: 4096, entry: 256, ..Laid::new(&[(AMD64, 40, 49, true)]) };
    check(&large.disk(), Ok(40 * 4096..50 * 4096));
    let way = "`losetup --read-only --partscan --find --show FILE` makes a device of each partition, which \
        erofs:/dev/NAME reads";
    let several = [(AMD64, 40, 49, true), (AMD64, 50, 59, true)];
    let listed =
        "partition 1 \"p0\" (root of amd64, EROFS), partition 2 \"p1\" (root of amd64, EROFS)";
    let text = format!("it has 2 root partitions for amd64: {listed}. {way}");
    check(&Laid::new(&several).disk(), Err(&text));
    let none = [(ARM64, 40, 49, true), (DATA, 50, 59, true)];
    let listed = "partition 1 \"p0\" (root of arm64, EROFS), partition 2 \"p1\" (EROFS)";
    let text =
        format!("it has no root partition for amd64, and 2 partitions with EROFS: {listed}. {way}");
    check(&Laid::new(&none).disk(), Err(&text));
    let text = format!(
        "it has no root partition for amd64, and 0 partitions with EROFS: it is empty. {way}"
    );
    check(&Laid::new(&[]).disk(), Err(&text));
}

#[test]
fn damaged_tables() {
    let none = Err("it has no valid GUID partition table");
    check(&[], none.clone());
    check(&[0; 600], none.clone());
    let sound = Laid::new(&[(AMD64, 40, 49, true)]).disk();
    // With a damaged header or table, the one at the end counts.
    for at in [512, 512 + 30, 512 + 84, 1024 + 33] {
        let mut disk = sound.clone();
        disk[at] ^= 1;
        check(&disk, Ok(40 * 512..50 * 512));
        disk[399 * 512] ^= 1;
        check(&disk, none.clone());
    }
    let outside = Laid::new(&[(AMD64, 40, 400, true)]).disk();
    let text = "partition 1 is at bytes 20480 to 205312, but the disk has 204800";
    check(&outside, Err(text));
    let reversed = Laid::new(&[(AMD64, 40, 20, true)]).disk();
    let text = "partition 1 is at bytes 20480 to 10752, but the disk has 204800";
    check(&reversed, Err(text));
}

/// Reading ends without a panic for any numbers, and takes little memory.
#[test]
fn any_numbers() {
    let sound = Laid::new(&[(AMD64, 40, 49, true), (DATA, 50, 59, true)]).disk();
    for at in (512..512 + HEADER).chain(1024..1024 + 256) {
        for byte in [0, 1, 0x7f, 0x80, 0xff] {
            let mut disk = sound.clone();
            disk[at] = byte;
            // The checksums are made to fit, so that the numbers are used.
            let entries = checksum(&disk[1024..1024 + 128 * 128]);
            if !(512 + 88..512 + 92).contains(&at) {
                disk[512 + 88..512 + 92].copy_from_slice(&entries.to_le_bytes());
            }
            disk[512 + 16..512 + 20].fill(0);
            let sum = checksum(&disk[512..512 + HEADER]);
            disk[512 + 16..512 + 20].copy_from_slice(&sum.to_le_bytes());
            drop(root(&&disk[..], "amd64"));
        }
    }
}

/// The hash tree, its signature, and the EFI system partition. Source: Discoverable Partitions Specification;
/// `2C7357ED-EBD2-46D9-AEC1-23D437EC2BF5`, `41092B05-9FC8-4523-994F-2DEF0408B176` and
/// `C12A7328-F81F-11D2-BA4B-00A0C93EC93B`.
const OTHERS: [[u8; 16]; 3] = [
    [
        0xed, 0x57, 0x73, 0x2c, 0xd2, 0xeb, 0xd9, 0x46, 0xae, 0xc1, 0x23, 0xd4, 0x37, 0xec, 0x2b,
        0xf5,
    ],
    [
        0x05, 0x2b, 0x09, 0x41, 0xc8, 0x9f, 0x23, 0x45, 0x99, 0x4f, 0x2d, 0xef, 0x04, 0x08, 0xb1,
        0x76,
    ],
    [
        0x28, 0x73, 0x2a, 0xc1, 0x1f, 0xf8, 0xd2, 0x11, 0xba, 0x4b, 0x00, 0xa0, 0xc9, 0x3e, 0xc9,
        0x3b,
    ],
];

#[test]
fn partitions_that_verify_or_boot_are_no_root() {
    for (kind, name) in OTHERS.into_iter().zip([
        "hash tree of the root of amd64",
        "signature of the root of amd64",
        "EFI system partition",
    ]) {
        // The root has another file system, and the other partition has EROFS's magic.
        let disk = Laid::new(&[(DATA, 40, 49, false), (kind, 50, 59, true)]).disk();
        let error = root(&&disk[..], "amd64").unwrap_err().to_string();
        assert!(error.contains(&format!("partition 2 \"p1\" ({name}, EROFS)")), "{error}");
        let disk = Laid::new(&[(ARM64, 40, 49, true), (kind, 50, 59, true)]).disk();
        assert_eq!(root(&&disk[..], "amd64").unwrap().bytes, 40 * 512..50 * 512);
    }
    let has_tree =
        |partitions: &[_]| root(&&Laid::new(partitions).disk()[..], "amd64").unwrap().has_tree;
    assert!(has_tree(&[(AMD64, 40, 49, true), (OTHERS[0], 50, 59, false)]));
    assert!(!has_tree(&[(AMD64, 40, 49, true), (OTHERS[2], 50, 59, false)]));
    // A tree for another architecture verifies another root.
    assert!(!has_tree(&[(ARM64, 40, 49, true), (OTHERS[0], 50, 59, false)]));
}
