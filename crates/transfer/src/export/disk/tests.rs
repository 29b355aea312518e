//! Tests the data around an image. Tests of the binary check a whole disk with other programs.

use super::super::erofs::PMEM_ALIGN;
use super::*;

fn ids() -> Ids {
    let root = RootType::for_architecture("arm64").unwrap();
    Ids { disk: Uuid::from_u128(1), root, partition: Uuid::from_u128(2), align: MIB }
}

/// Writes a disk in pieces. The image's superblock states `said` blocks, while the image has `image` bytes.
fn disk(said: u32, image: usize, piece: usize) -> io::Result<Vec<u8>> {
    let mut bytes: Vec<u8> = (0..251).cycle().take(image).collect();
    bytes[1060..1064].copy_from_slice(&said.to_le_bytes());
    let mut out = Vec::new();
    let mut disk = Disk { out: &mut out, ids: ids(), start: Vec::new(), layout: None, written: 0 };
    for piece in bytes.chunks(piece) {
        disk.write_all(piece)?;
    }
    let length = disk.finish()?;
    assert_eq!(length, out.len() as u64);
    assert!(out[1 << 20..].starts_with(&bytes));
    Ok(out)
}

#[test]
fn pieces_do_not_matter() {
    let whole = disk(3, 3 * 4096, 3 * 4096).unwrap();
    assert_eq!(whole.len(), 3 << 20);
    for piece in [1, 1000, 4095, 4096, 4097] {
        assert!(disk(3, 3 * 4096, piece).unwrap() == whole, "{piece}");
    }
    assert_eq!(disk(257, 257 * 4096, 1 << 20).unwrap().len(), 4 << 20);
}

#[test]
fn an_image_that_is_not_as_long_as_it_said_is_none() {
    for (said, image, expect) in [
        (3, 2 * 4096, "the image has 8192 bytes, but its superblock states Some(12288)"),
        (1, 2 * 4096, "the image has 8192 bytes, but its superblock states Some(4096)"),
        (0, 4096, "the image has 4096 bytes, but its superblock states Some(0)"),
        (1, 4095, "the image has 0 bytes, but its superblock states None"),
    ] {
        assert_eq!(disk(said, image, 4096).unwrap_err().to_string(), expect);
    }
}

/// Source: UEFI 2.10, tables 5.4 to 5.6. The test reads the fields by their offsets, without a library.
#[test]
fn both_tables_are_where_they_have_to_be() {
    let bytes = disk(3, 3 * 4096, 4096).unwrap();
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let short = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let last = (3 << 20) / 512 - 1;
    // The protective MBR has one partition of type 0xee, which covers the disk.
    assert_eq!((&bytes[510..512], bytes[450]), (&b"\x55\xaa"[..], 0xee));
    assert_eq!((short(454), u64::from(short(458))), (1, last));
    let headers = [(1, last, 2), (last, 1, last - 32)];
    for (here, other, entries) in headers {
        let at = usize::try_from(here * 512).unwrap();
        assert_eq!(&bytes[at..at + 8], b"EFI PART");
        assert_eq!([24, 32, 40, 48].map(|it| number(at + it)), [here, other, 34, last - 33]);
        assert_eq!((number(at + 72), short(at + 80), short(at + 84)), (entries, 128, 128));
        let crc = crc::Crc::<u32>::new(&crc::CRC_32_ISO_HDLC);
        let mut header = bytes[at..at + 92].to_vec();
        header[16..20].fill(0);
        assert_eq!(crc.checksum(&header), short(at + 16));
        let start = usize::try_from(entries * 512).unwrap();
        assert_eq!(crc.checksum(&bytes[start..start + 128 * 128]), short(at + 88));
        // The first three numbers of types and ids are little-endian.
        assert_eq!(bytes[start..start + 4], [0x45, 0xb0, 0x21, 0xb9]);
        assert_eq!(bytes[start + 31], 2);
        assert_eq!([32, 40, 48].map(|it| number(start + it)), [2048, 4095, 1 << 60]);
        assert_eq!(&bytes[start + 56..start + 66], b"r\0o\0o\0t\0\0\0");
    }
    let (head, tail) = (34 * 512, bytes.len() - 33 * 512);
    assert!(bytes[head..1 << 20].iter().all(|it| *it == 0));
    assert!(bytes[(1 << 20) + 3 * 4096..tail].iter().all(|it| *it == 0));
}

/// Layout for the largest possible image, without its bytes.
#[test]
fn large_disks_have_a_table() {
    let layout = DiskLayout::for_image(u64::from(u32::MAX) * 4096, &ids()).unwrap();
    assert_eq!(layout.table.bytes, (1 << 44) + (2 << 20));
    // The number of sectors is too large for the protective MBR.
    assert_eq!(layout.table.head[458..462], [0xff; 4]);
}

/// A pmem device must have whole units of 2 MiB.
#[test]
fn disks_for_dax_are_aligned() {
    let ids = Ids { align: PMEM_ALIGN, ..ids() };
    for (image, expect) in [(4096, 4 << 20), (1 << 20, 4 << 20), ((2 << 20) + 4096, 6 << 20)] {
        assert_eq!(DiskLayout::for_image(image, &ids).unwrap().table.bytes, expect, "{image}");
    }
}

/// The disks without options, since they exist. Other programs find a root by its ids, so these must not change.
#[test]
fn bytes_are_those_of_the_first_version() {
    let bytes = disk(3, 3 * 4096, 4096).unwrap();
    let digest = image::digest::Digest::sha256(&bytes).to_string();
    assert_eq!(digest, "sha256:0abf165419b16d4331d5bd5b128b1d916ca48407e6885f2e95588f781ba4c031");
}

#[test]
fn types_are_those_of_the_specification() {
    use gpt::partition_types::{
        LINUX_ROOT_ARM_32, LINUX_ROOT_ARM_64, LINUX_ROOT_X64, LINUX_ROOT_X86,
    };
    for (architecture, expect) in [
        ("386", LINUX_ROOT_X86),
        ("amd64", LINUX_ROOT_X64),
        ("arm", LINUX_ROOT_ARM_32),
        ("arm64", LINUX_ROOT_ARM_64),
    ] {
        let found = RootType::for_architecture(architecture).unwrap();
        assert_eq!(found.root(), expect.guid, "{architecture}");
    }
    assert!(RootType::for_architecture("x86_64").is_none());
    assert!(RootType::architectures().all(|it| RootType::for_architecture(it).is_some()));
}
