//! The smallest EROFS image, for test mounts: one block with one empty directory.

/// Makes the image. Source of every offset: Linux fs/erofs/erofs_fs.h.
pub(crate) fn empty_image() -> [u8; 4096] {
    let mut image = [0; 4096];
    let mut put = |at: usize, bytes: &[u8]| {
        for (to, &from) in image.iter_mut().skip(at).zip(bytes) {
            *to = from;
        }
    };
    const SUPERBLOCK: usize = 1024;
    const ROOT_NID: u16 = 36;
    const ROOT: usize = 36 * 32;
    put(SUPERBLOCK, &0xE0F5_E1E2_u32.to_le_bytes());
    put(SUPERBLOCK + 12, &[12]); // blkszbits
    put(SUPERBLOCK + 14, &ROOT_NID.to_le_bytes());
    put(SUPERBLOCK + 16, &1_u64.to_le_bytes()); // inos
    put(SUPERBLOCK + 36, &1_u32.to_le_bytes()); // blocks
    put(ROOT, &4_u16.to_le_bytes()); // i_format: compact, data inline after the inode
    put(ROOT + 4, &0o040_755_u16.to_le_bytes());
    put(ROOT + 6, &2_u16.to_le_bytes()); // i_nlink
    put(ROOT + 8, &27_u32.to_le_bytes()); // i_size: two entries of 12 bytes, "." and ".."
    put(ROOT + 16, &u32::MAX.to_le_bytes()); // no blocks
    for (entry, name_at) in [(ROOT + 32, 24_u16), (ROOT + 44, 25)] {
        put(entry, &u64::from(ROOT_NID).to_le_bytes());
        put(entry + 8, &name_at.to_le_bytes());
        put(entry + 10, &[2]); // a directory
    }
    put(ROOT + 56, b"...");
    image
}
