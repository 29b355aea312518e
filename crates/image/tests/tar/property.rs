//! Damages tars at random: the reader must not panic, and a tar that is read must be rebuilt unchanged.

use proptest::prelude::*;

use super::build::{Header, end, extended, file, member, padded, pax};

/// Makes a tar with entries of every kind.
fn everything() -> Vec<u8> {
    let acl = "user::rw-,user:1001:rw-,group::r--,mask::rw-,other::r--";
    let old = Header::new(b"s", b'S').gnu().size(512).with(482, b"\x01");
    let old = old.with(386, b"00000001000\x0000000001000\0").with(483, b"00000004000\0");
    let mut more = [0; 512];
    more[..24].copy_from_slice(b"00000003000\x0000000000000\0");
    [
        extended(b'g', &[(b"comment", b"x"), (b"gname", b"root")]),
        member(b"./", b'5', b""),
        pax(&[("path", "a/b"), ("mtime", "1.5"), ("SCHILY.xattr.user.a", "b"), ("size", "5")]),
        file("f", "hello"),
        pax(&[("SCHILY.acl.access", acl), ("LIBARCHIVE.xattr.user.b", "YWJj"), ("uid", "7")]),
        member(b"d", b'5', b""),
        member(b"././@LongLink", b'L', b"a/long/name\0"),
        member(b"././@LongLink", b'K', b"a/long/target\0"),
        Header::new(b"l", b'2').gnu().link(b"t").block(),
        Header::new(b"h", b'1').link(b"f").size(5).block(),
        padded(b"hello"),
        old.block(),
        more.to_vec(),
        padded(&[b'x'; 512]),
        pax(&[
            ("GNU.sparse.size", "999"),
            ("GNU.sparse.numblocks", "1"),
            ("GNU.sparse.map", "9,5"),
        ]),
        file("s", "hello"),
        pax(&[
            ("GNU.sparse.major", "1"),
            ("GNU.sparse.minor", "0"),
            ("GNU.sparse.realsize", "3000"),
        ]),
        Header::new(b"s", b'0').size(612).block(),
        padded(b"2\n0\n88\n2048\n12\n"),
        padded(&[b'y'; 100]),
        Header::new(b"c", b'3').with(329, b"0000001\x000000003\0").block(),
        member(b"unknown", b'?', b"some data"),
        end(),
        b"trailing".to_vec(),
    ]
    .concat()
}

/// Corrects the checksum of every block that looks like a header, so that damage reaches the code after the check.
fn mend(tar: &mut [u8]) {
    for block in tar.chunks_exact_mut(512) {
        if block[257..262] == *b"ustar" {
            let header = Header::new(b"", b'0').with(0, block);
            block.copy_from_slice(&header.block());
        }
    }
}

#[test]
fn everything_is_read() {
    assert_eq!(
        super::describe::read(&everything()).unwrap_err().to_string(),
        "entry \"unknown\" is of type '?', which is not supported"
    );
    image::tar::exercise(&everything());
}

#[derive(Debug, Clone)]
enum Damage {
    Set(usize, u8),
    Cut(usize),
    Insert(usize, Vec<u8>),
    Remove(usize, usize),
    Repeat(usize, usize),
    /// A digit or a separator, which is more likely to be accepted.
    Text(usize, prop::sample::Index),
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = 0..everything().len();
    prop_oneof![
        4 => (at.clone(), any::<u8>()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        6 => (at.clone(), any::<prop::sample::Index>()).prop_map(|(at, which)| Damage::Text(at, which)),
        1 => at.clone().prop_map(Damage::Cut),
        1 => (at.clone(), prop::collection::vec(any::<u8>(), 1..600))
            .prop_map(|(at, bytes)| Damage::Insert(at, bytes)),
        1 => (at.clone(), 1..2000_usize).prop_map(|(at, count)| Damage::Remove(at, count)),
        1 => (0..at.end / 512, 1..5_usize).prop_map(|(block, count)| Damage::Repeat(block, count)),
    ]
}

fn apply(tar: &mut Vec<u8>, damage: &Damage) {
    let within = |at: usize| at.min(tar.len());
    match damage {
        Damage::Set(at, byte) => {
            let at = within(*at);
            tar.splice(at..(at + 1).min(tar.len()), [*byte]);
        }
        Damage::Text(at, which) => {
            let at = within(*at);
            tar.splice(
                at..(at + 1).min(tar.len()),
                [*which.get(b"0123456789 =\n,.-/\0\xffxgLKS12345")],
            );
        }
        Damage::Cut(at) => tar.truncate(*at),
        Damage::Insert(at, bytes) => {
            let at = within(*at);
            tar.splice(at..at, bytes.iter().copied());
        }
        Damage::Remove(at, count) => {
            let (start, end) = (within(*at), within(*at + *count));
            tar.drain(start..end);
        }
        Damage::Repeat(block, count) => {
            let (start, end) = (within(block * 512), within((block + count) * 512));
            let blocks = tar[start..end].to_vec();
            tar.splice(start..start, blocks);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn damaged_tars(damages in prop::collection::vec(damage(), 1..6), mended: bool) {
        let mut tar = everything();
        for damage in &damages {
            apply(&mut tar, damage);
        }
        if mended {
            mend(&mut tar);
        }
        image::tar::exercise(&tar);
    }

    #[test]
    fn anything(bytes in prop::collection::vec(any::<u8>(), 0..3000)) {
        image::tar::exercise(&bytes);
    }
}
