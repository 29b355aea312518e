//! Writes an EFI system partition: FAT32 with one file, the boot program that firmware starts without configuration.
//!
//! It is written from front to back, because a disk is. Source: Microsoft, "FAT: General Overview of On-Disk Format",
//! 1.03; UEFI 2.10, 13.3 "File System Format" and 3.5.1.1 "Removable Media Boot Behavior".

use std::io::{self, Write};

use super::table::zeros;

const SECTOR: u32 = 512;
/// Sectors before the first FAT, as mkfs.fat has them.
const RESERVED: u32 = 32;
/// Minimum number of clusters of FAT32, with some more, because some programs are wrong by a few.
const CLUSTERS_MIN: u32 = 65_600;
/// Free space in bytes, so that a signature can be added to the file.
const SPARE: u32 = 1 << 20;
/// Length of a directory entry.
const ENTRY: usize = 32;
/// Clusters of the directories. The first one is the root's, and the file follows the last one.
const ROOT: u32 = 2;
const EFI: u32 = 3;
const BOOT: u32 = 4;
const FILE: u32 = 5;
/// Last cluster of a file.
const END: u32 = 0x0fff_ffff;
/// Attributes of entries.
const VOLUME: u8 = 0x08;
const DIRECTORY: u8 = 0x10;
const ARCHIVE: u8 = 0x20;
/// 1 January 1980, the first date of FAT.
const DATE: [u8; 2] = [0x21, 0];

/// The file system for a file of a given length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FatLayout {
    /// Length of the file in bytes.
    file: u32,
    /// In sectors.
    cluster: u32,
    clusters: u32,
    /// Length of one of the two FATs, in sectors.
    fat: u32,
}

impl FatLayout {
    /// Returns the layout for a file of at most 2 GiB; `None` if it is longer.
    pub(super) fn for_file(length: usize) -> Option<Self> {
        let file = u32::try_from(length).ok().filter(|it| *it <= 1 << 31)?;
        // As mkfs.fat: small clusters up to 260 MiB.
        let cluster = if file < 256 << 20 { 1 } else { 8 };
        let needed = (file + SPARE).div_ceil(cluster * SECTOR) + FILE - ROOT;
        let clusters = needed.max(CLUSTERS_MIN);
        let fat = ((clusters + ROOT) * 4).div_ceil(SECTOR);
        Some(Self { file, cluster, clusters, fat })
    }

    /// Returns the length of the file system in bytes.
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.sectors()) * u64::from(SECTOR)
    }

    fn sectors(&self) -> u32 {
        RESERVED + 2 * self.fat + self.clusters * self.cluster
    }

    /// Returns the number of clusters with data.
    fn used(&self) -> u32 {
        FILE - ROOT + self.file.div_ceil(self.cluster * SECTOR)
    }

    /// Writes the file system. `name` is a name with eleven letters, without the dot; `start` is the number of sectors
    /// before the partition.
    pub(super) fn write(
        &self,
        name: &[u8; 11],
        content: &[u8],
        id: [u8; 4],
        start: u32,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let (boot, info) = (self.boot_sector(id, start), self.information());
        let mut head = Vec::new();
        // The backup is in sector 6.
        for place in [0, 6] {
            head.resize(place * SECTOR as usize, 0);
            head.extend_from_slice(&boot);
            head.extend_from_slice(&info);
        }
        head.resize((RESERVED * SECTOR) as usize, 0);
        out.write_all(&head)?;
        for _ in 0..2 {
            self.write_fat(out)?;
        }
        let cluster = (self.cluster * SECTOR) as usize;
        let mut write_directory = |entries: &[[u8; ENTRY]]| {
            let mut bytes = entries.concat();
            bytes.resize(cluster, 0);
            out.write_all(&bytes)
        };
        let directory = |name, cluster| entry(name, DIRECTORY, cluster, 0);
        write_directory(&[entry(b"ESP        ", VOLUME, 0, 0), directory(b"EFI        ", EFI)])?;
        // The root has the number 0 as a parent.
        let links =
            |own, parent| [directory(b".          ", own), directory(b"..         ", parent)];
        let [own, parent] = links(EFI, 0);
        write_directory(&[own, parent, directory(b"BOOT       ", BOOT)])?;
        let [own, parent] = links(BOOT, EFI);
        write_directory(&[own, parent, entry(name, ARCHIVE, FILE, self.file)])?;
        out.write_all(content)?;
        let written = u64::from(self.used() - (FILE - ROOT)) * u64::from(self.cluster * SECTOR);
        zeros(out, written - u64::from(self.file))?;
        let free = u64::from(self.clusters - self.used());
        zeros(out, free * u64::from(self.cluster * SECTOR))
    }

    fn write_fat(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut entries = vec![0x0fff_fff8, END, END, END, END];
        let last = ROOT + self.used() - 1;
        entries.extend((FILE..last).map(|it| it + 1));
        if last >= FILE {
            entries.push(END);
        }
        let bytes: Vec<u8> = entries.into_iter().flat_map(u32::to_le_bytes).collect();
        out.write_all(&bytes)?;
        zeros(out, u64::from(self.fat) * u64::from(SECTOR) - bytes.len() as u64)
    }

    /// The boot sector without a program.
    fn boot_sector(&self, id: [u8; 4], start: u32) -> [u8; SECTOR as usize] {
        let mut sector = [0; SECTOR as usize];
        let mut put = |at: usize, field: &[u8]| sector[at..at + field.len()].copy_from_slice(field);
        put(0, &[0xeb, 0x58, 0x90]);
        put(3, b"QUIRE   ");
        put(11, &[0, 2]);
        put(13, &self.cluster.to_le_bytes()[..1]);
        put(14, &RESERVED.to_le_bytes()[..2]);
        // Two FATs on a fixed disk.
        put(16, &[2]);
        put(21, &[0xf8]);
        // Sectors of a track, and heads, which only a BIOS needs.
        put(24, &[63, 0, 255, 0]);
        put(28, &start.to_le_bytes());
        put(32, &self.sectors().to_le_bytes());
        put(36, &self.fat.to_le_bytes());
        put(44, &ROOT.to_le_bytes());
        // The sectors of the information and of the backup.
        put(48, &[1, 0, 6, 0]);
        put(64, &[0x80, 0, 0x29]);
        put(67, &id);
        put(71, b"ESP        FAT32   ");
        put(510, &[0x55, 0xaa]);
        sector
    }

    /// The sector with the number of free clusters.
    fn information(&self) -> [u8; SECTOR as usize] {
        let mut sector = [0; SECTOR as usize];
        let mut put = |at: usize, field: &[u8]| sector[at..at + field.len()].copy_from_slice(field);
        put(0, b"RRaA");
        put(484, b"rrAa");
        put(488, &(self.clusters - self.used()).to_le_bytes());
        put(492, &(ROOT + self.used()).to_le_bytes());
        put(510, &[0x55, 0xaa]);
        sector
    }
}

fn entry(name: &[u8; 11], attributes: u8, cluster: u32, size: u32) -> [u8; ENTRY] {
    let mut entry = [0; ENTRY];
    let cluster = cluster.to_le_bytes();
    let mut put = |at: usize, field: &[u8]| entry[at..at + field.len()].copy_from_slice(field);
    put(0, name);
    put(11, &[attributes]);
    // The dates of creation, of the last access and of the last change.
    for at in [16, 18, 24] {
        put(at, &DATE);
    }
    put(20, &cluster[2..]);
    put(26, &cluster[..2]);
    put(28, &size.to_le_bytes());
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(content: &[u8]) -> (FatLayout, Vec<u8>) {
        let layout = FatLayout::for_file(content.len()).unwrap();
        let mut out = Vec::new();
        layout.write(b"BOOTX64 EFI", content, [1, 2, 3, 4], 2048, &mut out).unwrap();
        assert_eq!(out.len() as u64, layout.bytes());
        (layout, out)
    }

    /// Follows the chain of a file as a reader does. Tests of the binary use other programs.
    #[test]
    fn the_file_is_where_its_entry_leads() {
        for length in [0, 1, 512, 513, 100_000] {
            let content: Vec<u8> = (0..251).cycle().take(length).collect();
            let (layout, bytes) = written(&content);
            let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            let fat = (RESERVED * SECTOR) as usize;
            let data = fat + (2 * layout.fat * SECTOR) as usize;
            let place = |cluster: u32| data + ((cluster - 2) * SECTOR) as usize;
            assert_eq!(&bytes[place(ROOT) + 32..place(ROOT) + 43], b"EFI        ");
            let file = place(BOOT) + 64;
            assert_eq!(&bytes[file..file + 11], b"BOOTX64 EFI");
            assert_eq!(number(file + 28) as usize, length);
            let mut found = Vec::new();
            let mut cluster = FILE;
            while found.len() < length {
                found.extend_from_slice(&bytes[place(cluster)..place(cluster + 1)]);
                cluster = number(fat + cluster as usize * 4);
            }
            assert!(length == 0 || cluster == END, "{length}");
            assert!(found.starts_with(&content));
            let (first, second) = (&bytes[fat..], &bytes[fat + (layout.fat * SECTOR) as usize..]);
            let length = (layout.fat * SECTOR) as usize;
            assert!(first[..length] == second[..length]);
        }
    }

    #[test]
    fn large_files_have_large_clusters() {
        let layout = FatLayout::for_file(300 << 20).unwrap();
        assert_eq!((layout.cluster, layout.clusters), (8, 77_059));
        assert_eq!(layout.clusters - layout.used(), SPARE / 4096);
        assert_eq!(FatLayout::for_file((1 << 31) + 1), None);
        assert!(FatLayout::for_file(1 << 31).is_some());
    }
}
