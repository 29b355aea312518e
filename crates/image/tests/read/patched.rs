//! Changes one field of a valid image, and expects one kind of error with the values that prove it.

use std::sync::atomic::AtomicBool;

use quire_image::erofs::read::{Image, TreeBounds, View, examine, to_tree_within};

use crate::small::{
    BLOCK, COMPACT, DEVICE_TABLE, DIR, EXTENDED, FILE, LINK, LONG, Options, PREFIXES, ROOT, SHARED,
    SPARSE, Small, TAIL, at, entries, icount, xattr, xattrs,
};

fn small() -> Small {
    Small::new(12, Options::default())
}

fn answer(bytes: &[u8]) -> String {
    match examine(bytes, 1 << 20) {
        Ok(found) => format!("{found:?}"),
        Err(error) => error.to_string(),
    }
}

/// Applies `patches` and expects the error "the image is corrupt: " followed by `kind`.
fn check(patches: &[(usize, &[u8])], kind: &str) {
    let patch = |image: Small, (at, bytes): &(usize, &[u8])| image.patch(*at, bytes);
    let image = patches.iter().fold(small(), patch);
    let answer = answer(&image.bytes);
    assert_eq!(answer.strip_prefix("the image is corrupt: ").unwrap_or(&answer), kind);
}

/// Changes one field of the superblock, and compares the whole result.
fn check_superblock(field: usize, bytes: &[u8], expect: &str) {
    assert_eq!(answer(&small().patch(1024 + field, bytes).bytes), expect);
}

#[test]
fn superblock() {
    check_superblock(0, &[0], "not an EROFS image");
    let mut bad = small().bytes;
    bad[1024 + 24] ^= 1;
    assert!(answer(&bad).starts_with("the image is corrupt: the superblock has the checksum 0x"));
    // The checksum is ignored without the feature bit.
    bad[1024 + 8] &= !1;
    assert!(answer(&bad).starts_with("Examined"));
    for (bits, text) in [(8, "2^8"), (17, "2^17"), (255, "2^255")] {
        let mut bad = small();
        bad.bytes[1024 + 12] = bits;
        let expect =
            format!("the image is corrupt: block size {text} bytes is not between 2^9 and 2^16");
        assert_eq!(answer(&bad.bytes), expect);
    }
    check_superblock(90, &[1], "the image uses unsupported directory blocks of 2^1 blocks");
    check_superblock(82, &[0x40], "the image uses unsupported features 0x400000");
    check_superblock(81, &[1], "the image uses unsupported metadata compression");
    check_superblock(11, &[0x40], "the image uses unsupported data of RAFS, the format of Nydus");
    // Features that do not affect uncompressed files may be set.
    let known = small().patch(1024 + 80, &[0x7f]);
    assert!(answer(&known.bytes).starts_with("Examined"));
    check_superblock(
        36,
        &[10],
        "the image is corrupt: the image has 36864 bytes, but its superblock states 10 blocks of 4096",
    );
    check_superblock(
        14,
        &144_u16.to_le_bytes(),
        "the image is corrupt: the root, inode 144, is not a directory: it has mode 100600",
    );
    let message = "the image is corrupt: inode 1152 takes 32 bytes at byte 36864 of the image, \
                   which has 36864";
    check_superblock(14, &1152_u16.to_le_bytes(), message);
    let message = "the image is corrupt: inode 64 takes 32 bytes at byte 2048 of the image, \
                   which has 36864";
    assert_ne!(answer(&small().bytes), message);
    check_superblock(
        40,
        &u32::MAX.to_le_bytes(),
        "the image is corrupt: inode 64 takes 32 bytes at byte 17592186042368 of the image, which has 36864",
    );
    // The image has fingerprints with the only long prefix, or with a prefix that does not exist.
    let named = |prefix| small().patch(1024 + 8, &[0x27]).patch(1024 + 105, &[prefix]);
    assert!(answer(&named(0).bytes).starts_with("Examined"));
    let missing =
        "the image is corrupt: fingerprints use long xattr prefix 1, but the image has only 1";
    assert_eq!(answer(&named(1).bytes), missing);
    check_superblock(
        86,
        &[0xff, 0xff],
        "the image is corrupt: the device table's slot of device 277 takes 128 bytes at byte 36864 \
         of the image, which has 36864",
    );
    check_superblock(
        88,
        &[0xff, 0xff],
        "the image is corrupt: the device table's slot of device 1 takes 128 bytes at byte 8388480 \
         of the image, which has 36864",
    );
}

#[test]
fn truncated() {
    let whole = small().bytes;
    for len in 0..1152 {
        assert_eq!(answer(&whole[..len]), "not an EROFS image", "{len} bytes");
    }
    for len in (1152..whole.len()).step_by(13) {
        let answer = answer(&whole[..len]);
        let text = format!("the image has {len} bytes, but its superblock states 9 blocks of 4096");
        let checksum = "the superblock takes 2944 bytes at byte 1152 of the image";
        assert!(answer.contains(&text) || answer.contains(checksum), "{len} bytes: {answer}");
    }
}

/// The kernel shows such a time, but tars and dumps cannot state it, so an image is not made of it.
#[test]
fn times_of_a_second_or_more_of_nanoseconds() {
    let nanoseconds = 1_000_000_000_u32.to_le_bytes();
    let check = |image: &Small, expect: Option<&str>| {
        assert!(answer(&image.bytes).starts_with("Examined"));
        let opened = Image::open(&image.bytes[..]).unwrap();
        let never = AtomicBool::new(false);
        let bounds = TreeBounds { names: 1 << 20, bytes: 1 << 20, stored: 1 << 20, cancel: &never };
        let error = to_tree_within(&opened, View::Stored, bounds).err().map(|it| it.to_string());
        assert_eq!(error.as_deref(), expect);
    };
    check(&small(), None);
    // Those of compact inodes, of which the first is the root, and of an extended one.
    let text = "has 1000000000 nanoseconds in its time, more than 999999999";
    let of = |nid: u64| format!("the image is corrupt: inode {nid} {text}");
    check(&small().patch(1024 + 32, &nanoseconds), Some(&of(64)));
    check(&small().patch(at(FILE) + 40, &nanoseconds), Some(&of(96)));
}

#[test]
fn inodes() {
    check(&[(at(LINK) + 4, &[0xff, 0xff])], "inode 160 has mode 177777, which has no file type");
    check(&[(at(LINK) + 4, &[0, 0])], "inode 160 has mode 0, which has no file type");
    let format = |bits: u16| bits.to_le_bytes();
    check(&[(at(FILE), &format(0x21))], "the image uses unsupported format 0x21 of inode 96");
    check(
        &[(at(FILE), &format(5 << 1 | 1))],
        "the image uses unsupported data layout 5 of inode 96",
    );
    check(
        &[(at(SPARSE) + 16, &format(0x80))],
        "the image uses unsupported chunk format 0x80 of inode 128",
    );
    check(
        &[(at(FILE) + 8, &(1_u64 << 63).to_le_bytes())],
        "inode 96 has 9223372036854775808 bytes, more than 2^63 - 1",
    );
    // An extended inode at the very end.
    let mut late = small();
    let end = late.bytes.len() - 32;
    let inode = late.bytes[at(FILE)..at(FILE) + 32].to_vec();
    late = late.patch(end, &inode);
    let root = entries(&[(".", 0, 2), ("..", 0, 2), ("x", 1, 1)], |slot| [64, 1151][slot]);
    late = late.patch(at(ROOT) + COMPACT, &root).patch(at(ROOT) + 8, &[root.len() as u8]);
    let message = "the image is corrupt: inode 1151 takes 64 bytes at byte 36832 of the image, \
                   which has 36864";
    assert_eq!(answer(&late.bytes), message);
}

#[test]
fn places() {
    let outside = |patches: &[(usize, &[u8])], part: &str, len: u64, at: u64| {
        let text = format!("{part} takes {len} bytes at byte {at} of the image, which has 36864");
        check(patches, &text);
    };
    let data = "the data of inode 96";
    outside(&[(at(FILE) + 16, &[8])], data, 4196, 32768);
    outside(&[(at(FILE) + 6, &[1])], data, 4196, 4096 * ((1_u64 << 32) + 5));
    outside(&[(at(FILE) + 6, &[0xff, 0xff])], data, 4196, 4096 * ((0xffff_u64 << 32) + 5));
    outside(&[(at(FILE) + 12, &[1])], data, (1 << 32) + 4196, 20480);
    outside(&[(at(SPARSE) + COMPACT + 20, &[9])], "the data of inode 128", 50, 36864);
    let table = "the chunk table of inode 128";
    let image = small().patch(at(SPARSE) + 8, &u32::MAX.to_le_bytes());
    let size = u64::from(u32::MAX);
    let message = format!(
        "the image is corrupt: {table} takes 8 bytes at byte 36864 of the image, which has 36864"
    );
    let found = quire_image::erofs::read::Image::open(&image.bytes[..]).unwrap();
    let inode = found.inode(quire_image::erofs::read::Nid(128)).unwrap();
    assert_eq!(inode.size(), size);
    let last = found
        .map(&inode, quire_image::erofs::read::ByteOffset((36864 - 4128) / 8 * 4096))
        .unwrap_err();
    assert_eq!(last.to_string(), message);

    check(
        &[(at(SPARSE) + COMPACT + 4, &[3])],
        "the data of inode 128 takes 4096 bytes at byte 12288 of device 1, which has 8192",
    );
    check(
        &[(at(SPARSE) + COMPACT + 2, &[2]), (1024 + 86, &[2]), (DEVICE_TABLE + 128, &[0; 128])],
        // The second device slot overwrites the prefixes.
        "long xattr prefix 0 has 0 bytes, not 1 to 256",
    );
    // Only the low bits of a device number are used, as many as the number of devices requires.
    let masked = small().patch(at(SPARSE) + COMPACT + 2, &[0xfd, 0xff]);
    assert!(answer(&masked.bytes).starts_with("Examined"));
    let three = small().patch(1024 + 86, &[2]).patch(1024 + 88, &[9]);
    let message = "inode 128 has data on device 3, but the image has only 2 besides itself";
    let three = three.patch(1152, &[0; 256]).patch(at(SPARSE) + COMPACT + 2, &[3]);
    assert_eq!(answer(&three.bytes), format!("the image is corrupt: {message}"));

    check(
        &[(at(TAIL) + 8, &4608_u32.to_le_bytes())],
        "inode 112 has 512 bytes of inline data at byte 3616, beyond the end of the block",
    );
    check(&[(at(LINK) + 8, &[0])], "symlink 160 has a target of 0 bytes, not 1 to 4095");
    check(&[(at(LINK) + 9, &[16])], "symlink 160 has a target of 4102 bytes, not 1 to 4095");
    check(&[(at(LINK) + COMPACT + 2, &[0])], "the target of symlink 160 has a NUL byte at 2");
}

#[test]
fn directories() {
    let data = small().data;
    let block = |offset: u16, block: u64, len: usize| {
        format!("block {block} of directory 80 has {len} bytes and its first name at byte {offset}")
    };
    for offset in [0_u16, 1, 11, 35, 4096, 4104, u16::MAX] {
        check(&[(data + 8, &offset.to_le_bytes())], &block(offset, 0, 4096));
    }
    check(&[(data + 4096 + 8, &[24])], &block(24, 1, 13));
    let name = |entry: usize, start: u16, end: u16| {
        format!("entry {entry} in block 0 of directory 80 has a name at bytes {start} to {end}")
    };
    check(&[(data + 20, &36_u16.to_le_bytes())], &name(0, 36, 36));
    check(&[(data + 20, &300_u16.to_le_bytes())], &name(0, 36, 300));
    check(&[(data + 32, &35_u16.to_le_bytes())], &name(1, 37, 35));
    check(&[(data + 32, &4096_u16.to_le_bytes())], &name(1, 37, 4096));
    // The first name is too long if the last is empty.
    check(&[(data + 39, &[0])], &name(2, 39, 39));
    check(
        &[(data + 39, b"/")],
        "directory 80 has an invalid entry: \"/\" is not a file name: it has a slash",
    );
    check(&[(data + 39, b".")], "directory 80 has \".\" after \"..\"");
    check(&[(data + 4096 + 12, b"a")], "directory 80 has \"a\" after \"a\"");
    check(&[(data + 12, &[80])], "directory 80 has \"..\" at inode 80, not at 64");
    check(&[(data, &[96])], "directory 80 has \".\" at inode 96, not at 80");
    check(&[(data + 24 + 10, &[7])], "directory 80 has \"a\" with type 7, but it has mode 100644");
    // Types may be unknown.
    assert!(answer(&small().patch(data + 24 + 10, &[0]).bytes).starts_with("Examined"));
    check(
        &[(data + 24, &[80]), (data + 24 + 10, &[2])],
        "directory 80 has a second name \"/dir/a\"",
    );
    check(
        &[(data + 24, &[64]), (data + 24 + 10, &[2])],
        "directory 64 has a second name \"/dir/a\"",
    );
    check(&[(data + 24, &[0; 8])], "inode 0 has mode 0, which has no file type");
    check(
        &[(data + 24, &[0xff; 8])],
        "inode 18446744073709551615 takes 32 bytes at byte 18446744073709551615 of the image, \
         which has 36864",
    );
}

#[test]
fn extended_attributes() {
    let own = at(DIR) + EXTENDED;
    check(&[(own + 4, &[5])], "inode 80 has 24 bytes of xattrs, too few for 5 shared ones");
    check(
        &[(own + 16, &[4])],
        "inode 80 has an xattr of 12 bytes at byte 16 of its xattrs, where 8 are left",
    );
}

/// Replaces the xattrs of `/long`.
fn check_xattrs(filter: u32, shared: &[u32], inline: &[Vec<u8>], kind: &str) {
    let own = xattrs(filter, shared, inline);
    let count = icount(&own).to_le_bytes();
    check(&[(at(LONG) + 2, &count), (at(LONG) + COMPACT, &own)], kind);
}

#[test]
fn made_up_xattrs() {
    let one = |index, rest: &str| [xattr(index, rest, b"v")];
    check_xattrs(
        0,
        &[],
        &one(7, "x"),
        "inode 224 has an xattr with prefix 0x7, which does not exist",
    );
    check_xattrs(
        0,
        &[],
        &one(0x81, "x"),
        "inode 224 has an xattr with prefix 0x81, which does not exist",
    );
    let name = "is not an xattr name: it must have 1 to 255 bytes and no NUL";
    check_xattrs(
        0,
        &[],
        &one(1, "a\0b"),
        &format!("inode 224 has an invalid xattr: \"user.a\\x00b\" {name}"),
    );
    let long = "x".repeat(251);
    check_xattrs(
        0,
        &[],
        &one(1, &long),
        &format!("inode 224 has an invalid xattr: \"user.{long}\" {name}"),
    );
    let same = [xattr(0x80, "x", b"1"), xattr(1, "long.prefix.x", b"2")];
    check_xattrs(0, &[], &same, "inode 224 has xattr \"user.long.prefix.x\" twice");
    let id = (SHARED / 4) as u32;
    check_xattrs(0, &[id, id], &[], "inode 224 has xattr \"security.selinux\" twice");
    check_xattrs(
        u32::MAX,
        &[],
        &one(1, "x"),
        "inode 224 has xattr \"user.x\", which its name filter 0xffffffff denies",
    );
    check_xattrs(
        0,
        &[u32::MAX],
        &[],
        "shared xattr 4294967295 takes 4 bytes at byte 17179869180 of the image, which has 36864",
    );
    check(
        &[(SHARED + 2, &[0xff, 0xff])],
        "shared xattr 2048 takes 65542 bytes at byte 8196 of the image, which has 36864",
    );
    check(
        &[(at(BLOCK) + 2, &[0xff, 0xff])],
        "the xattrs of inode 176 takes 262148 bytes at byte 5664 of the image, which has 36864",
    );
    // Zeros are padding, which mkfs.erofs writes with --root-xattr-isize.
    let room = [xattr(1, "x", b"v"), vec![0; 12]];
    let own = xattrs(0, &[], &room);
    let small = small().patch(at(LONG) + 2, &icount(&own).to_le_bytes());
    let small = small.patch(at(LONG) + COMPACT, &own);
    assert!(answer(&small.bytes).contains("xattrs: 3"));
}

#[test]
fn long_prefixes() {
    check(&[(PREFIXES, &[0, 0])], "long xattr prefix 0 has 0 bytes, not 1 to 256");
    check(&[(PREFIXES, &[1, 1])], "long xattr prefix 0 has 257 bytes, not 1 to 256");
    check(&[(PREFIXES + 2, &[9])], "long xattr prefix 0 continues prefix 9, which does not exist");
    check(
        &[(1024 + 92, &u32::MAX.to_le_bytes())],
        "long xattr prefix 0 takes 3 bytes at byte 17179869180 of the image, which has 36864",
    );
    // The prefixes are in the packed inode, in this test `file`, unless the image states that they are plain.
    let packed = small().patch(1024 + 80, &[0x6c]).patch(1024 + 96, &[96]);
    let inside = packed.clone().patch(1024 + 92, &[0; 4]);
    let table = [&[13, 0, 1], &b"long.prefix."[..]].concat();
    let start = inside.data + 2 * 4096;
    let inside = inside.patch(start, &table);
    assert!(answer(&inside.bytes).starts_with("Examined"));
    let beyond = "long xattr prefix 0 takes 3 bytes at byte 6656 of the image, which has 4196";
    let far = inside.clone().patch(1024 + 93, &[6, 1]);
    assert!(answer(&far.bytes).contains("long xattr prefix 0 takes 3 bytes"), "{beyond}");
    let plain = packed.patch(1024 + 8, &[0x17]);
    assert!(answer(&plain.bytes).starts_with("Examined"));
}
