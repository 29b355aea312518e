//! Images that are modified after they were built, as by an attacker.

/// Replaces the only occurrence of `from` by `to`, which has the same length.
pub fn patch(bytes: &mut [u8], from: &[u8], to: &[u8]) {
    let places = bytes.windows(from.len()).enumerate().filter(|it| it.1 == from).map(|it| it.0);
    let places: Vec<_> = places.collect();
    let &[place] = &places[..] else { panic!("{places:?}") };
    bytes[place..place + to.len()].copy_from_slice(to);
}

/// Updates the superblock's checksum. Source: Linux `fs/erofs/erofs_fs.h`, `checksum`: crc32c without the final
/// inversion, of the superblock and the rest of its block. RFC 3720, B.4, has the polynomial, with its bits reversed
/// here.
pub fn set_checksum(image: &mut [u8]) {
    image[1028..1032].fill(0);
    let block = 1_usize << image[1036];
    let end = if block > 1024 { block } else { 1024 + block };
    let mut sum = u32::MAX;
    for byte in &image[1024..end] {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = (sum >> 1) ^ if sum & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    image[1028..1032].copy_from_slice(&sum.to_le_bytes());
}
