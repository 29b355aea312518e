//! Layouts of a seed.

use super::OddLayout;
use super::tar::{Meta, Tar};
use crate::noise;

/// Numbers of a seed. Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", SplitMix64.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap()
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    fn meta(&mut self) -> Meta {
        let mode = self.pick(&[0o644, 0o755, 0o600, 0o4711, 0]);
        let mut meta = Meta::mode(mode).time(self.pick(&[1_700_000_000, 1, 1_699_999_999]), 0);
        if self.below(4) == 0 {
            meta.nanoseconds = self.pick(&[1, 500_000_000, 999_999_999]);
        }
        if self.below(3) == 0 {
            meta = meta.owner(self.pick(&[0, 1000, 65_536]), self.pick(&[0, 5, 70_000]));
        }
        match self.below(8) {
            0 => meta.xattr("security.capability", &[1, 0, 0, 2]),
            1 => meta.xattr("user.a", b"b"),
            _ => meta,
        }
    }
}

/// Names that meet in the layers of an image, and whose orders by whole paths and by directories differ.
const NAMES: [&str; 12] = ["a", "a.b", "a-", "b", "usr", "run", "lib", "0f", "c0", "z", "a0", "x"];

/// Makes an image of up to four layers. Its entries have the directories of their paths, so that most of such images
/// are accepted.
#[must_use]
pub fn random_layout(seed: u64) -> OddLayout {
    let mut numbers = Numbers(seed);
    let mut layers = Vec::new();
    let mut paths: Vec<String> = vec!["usr".to_owned()];
    let bytes = noise(9000);
    for layer in 0..=numbers.below(3) {
        let mut tar = Tar::default();
        if layer == 0 {
            tar.dir_as("boot", &numbers.meta()).dir_as("sysroot", &numbers.meta());
        }
        // Directories of the layer, which may also be made by lower layers.
        let mut directories = vec![String::new(), "usr/".to_owned()];
        tar.dir_as("usr", &Meta::mode(0o755).time(1_700_000_000 + layer as u64, 3));
        for _ in 0..numbers.below(60) {
            let above = directories[numbers.below(directories.len())].clone();
            let name = numbers.pick(&NAMES);
            let path = format!("{above}{name}");
            // /usr and /run must stay directories, and so must those that later entries are in.
            let must_stay =
                directories.contains(&format!("{path}/")) || path == "usr" || path == "run";
            match numbers.below(10) {
                _ if must_stay => drop(tar.dir_as(&path, &numbers.meta())),
                0..=2 => {
                    tar.dir_as(&path, &numbers.meta());
                    directories.push(format!("{path}/"));
                }
                3..=5 => {
                    let size = numbers.pick(&[0, 1, 64, 65, 100, 4096, 4097, 9000]);
                    let start = numbers.below(9000 - size + 1);
                    tar.file_as(&path, &numbers.meta(), &bytes[start..start + size]);
                    paths.push(path);
                }
                6 => {
                    tar.symlink(&path, vec![b's'; numbers.pick(&[1, 30, 1000, 3000, 4090])]);
                    paths.push(path);
                }
                7 => {
                    let target = paths[numbers.below(paths.len())].clone();
                    if target != "usr" && target != path {
                        tar.link(&path, target);
                        paths.push(path);
                    }
                }
                8 => {
                    let number = numbers.pick(&[(0, 0), (1, 3)]);
                    let flag = numbers.pick(b"346");
                    tar.special(&path, flag, &numbers.meta(), number);
                }
                _ => {
                    tar.file(format!("{above}.wh.{name}"), "");
                }
            }
        }
        layers.push(tar.finish());
    }
    OddLayout { name: format!("random-{seed}"), layers }
}
