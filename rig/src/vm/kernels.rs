//! Finds kernels to boot: Debian's, downloaded with apt and kept in the cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail};

use super::architecture::Architecture;
use crate::Skipped;
use crate::cache::{Cache, remove};
use crate::inputs::apt::Apt;
use crate::process::{need, quiet};

/// Names of kernels, the Debian releases whose current kernel they denote, and descriptions.
pub(crate) const NAMES: [(&str, &str, &str); 3] = [
    ("newest", "sid", "Debian's newest kernel; it moves"),
    ("lts", "trixie", "the kernel of Debian 13, 6.12"),
    ("oldest", "bookworm", "the kernel of Debian 12, 6.1"),
];

/// Time for which a kernel in the cache counts as current.
const FRESH: Duration = Duration::from_secs(24 * 60 * 60);

/// A kernel in the cache.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    /// Release, as printed by `uname -r`.
    pub(crate) release: String,
    pub(super) dir: PathBuf,
    pub(super) architecture: Architecture,
}

impl Kernel {
    fn open(dir: PathBuf, architecture: Architecture) -> Result<Self> {
        let release = fs::read_to_string(dir.join("release"))?;
        Ok(Self { release, dir, architecture })
    }

    pub(crate) fn image(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }

    /// Returns the directory of `modules.dep`, with the modules below it.
    pub(crate) fn modules(&self) -> PathBuf {
        self.dir.join("lib/modules").join(&self.release)
    }

    /// Returns the first two numbers of the release.
    pub(crate) fn version(&self) -> Option<(u32, u32)> {
        let mut numbers = self.release.split(|it: char| !it.is_ascii_digit());
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }
}

/// Returns the kernel with one of the `NAMES`, or one whose package's name contains this version.
///
/// A kernel in the cache is used for a day, and longer as long as no other can be downloaded, for example because the
/// mirror cannot be reached.
pub(crate) fn find_kernel(
    cache: &Cache,
    wanted: &str,
    architecture: Architecture,
    refresh: bool,
) -> Result<Kernel> {
    let entry = match architecture {
        Architecture::Amd64 => format!("linux-{wanted}"),
        Architecture::Arm64 => format!("linux-{wanted}-arm64"),
    };
    let kept = Kernel::open(cache.dir().join(&entry), architecture).ok();
    let moves = NAMES.iter().any(|it| it.0 == wanted);
    if let Some(kept) = &kept
        && !refresh
        && (!moves || is_fresh(&kept.dir))
    {
        return Ok(kept.clone());
    }
    let found = Packages::open(cache, wanted, architecture).and_then(|packages| {
        let package = packages.package()?;
        if let Some(kept) = &kept
            && package.ends_with(&format!("linux-image-{}", kept.release))
        {
            fs::write(kept.dir.join("release"), &kept.release)?;
            return Ok(kept.dir.clone());
        }
        cache.entry(&entry, true, |draft| packages.fetch(&package, draft))
    });
    match (found, kept) {
        (Ok(dir), _) => Kernel::open(dir, architecture),
        (Err(error), Some(kept)) => {
            println!("   using the kept Linux {}: {}", kept.release, reason(&error));
            Ok(kept)
        }
        (Err(error), None) if error.is::<Skipped>() => {
            bail!(Skipped(format!("no kernel {wanted} is kept, and {}", reason(&error))))
        }
        (Err(error), None) => Err(error),
    }
}

/// Returns an error's reason without the prefix `SKIPPED`.
fn reason(error: &anyhow::Error) -> String {
    error.downcast_ref::<Skipped>().map_or_else(|| format!("{error:#}"), |it| it.0.clone())
}

/// The file `release` is written again whenever apt confirms that the kernel is current.
fn is_fresh(dir: &Path) -> bool {
    let asked = fs::metadata(dir.join("release")).and_then(|it| it.modified());
    asked.is_ok_and(|at| SystemTime::now().duration_since(at).is_ok_and(|age| age < FRESH))
}

/// The packages of kernels.
struct Packages<'a> {
    wanted: &'a str,
    architecture: Architecture,
    apt: Apt,
}

impl<'a> Packages<'a> {
    fn open(cache: &Cache, wanted: &'a str, architecture: Architecture) -> Result<Self> {
        let suites: Vec<&str> = match NAMES.iter().find(|it| it.0 == wanted) {
            Some((_, suite, _)) => vec![*suite],
            None => NAMES.iter().map(|it| it.1).collect(),
        };
        let apt = Apt::open(super::work(cache)?, &suites, architecture.debian())?;
        Ok(Self { wanted, architecture, apt })
    }

    /// Returns the name of the requested kernel's package.
    fn package(&self) -> Result<String> {
        let suffix = format!("-cloud-{}", self.architecture.debian());
        if NAMES.iter().any(|it| it.0 == self.wanted) {
            // It depends on the release's current kernel for virtual machines.
            let current = format!("linux-image{suffix}");
            let found =
                self.depends(&current)?.into_iter().find(|it| it.starts_with("linux-image-"));
            return found.with_context(|| format!("{current} depends on no linux-image"));
        }
        let names = quiet(self.apt.command("apt-cache")?.args(["pkgnames", "linux-image-"]))?;
        let wanted = format!("linux-image-{}", self.wanted);
        let mut found: Vec<_> = names
            .lines()
            .filter(|it| it.starts_with(&wanted) && it.ends_with(&suffix))
            .map(String::from)
            .collect();
        found.sort();
        match &found[..] {
            [one] => Ok(one.clone()),
            [] => {
                bail!("apt offers no kernel {}; `cargo xtask vm --list` has the names", self.wanted)
            }
            more => bail!("{} is more than one kernel: {}", self.wanted, more.join(", ")),
        }
    }

    /// Returns the packages of Linux itself that a package depends on.
    fn depends(&self, package: &str) -> Result<Vec<String>> {
        let mut show = self.apt.command("apt-cache")?;
        let text = quiet(show.args(["show", "--no-all-versions", package]))?;
        Ok(linux_packages(&text).map(String::from).collect())
    }

    /// Downloads a package and the packages of its parts, and copies the files for a boot to `draft`.
    fn fetch(&self, package: &str, draft: &Path) -> Result<()> {
        let release =
            package.strip_prefix("linux-image-").context("a kernel's package has another name")?;
        println!("downloading Linux {release}");
        let mut packages = vec![package.to_owned()];
        packages.extend(self.depends(package)?.into_iter().filter(|it| it.ends_with(release)));
        let packages: Vec<_> = packages.iter().map(String::as_str).collect();
        let (unpacked, depmod) = (self.apt.dir().join("unpacked"), need("depmod")?);
        self.apt.unpack(&packages, &unpacked)?;
        let places = ["usr/lib/modules", "lib/modules"].map(|it| unpacked.join(it).join(release));
        let modules = places.iter().find(|it| it.is_dir());
        let modules =
            modules.with_context(|| format!("the packages of {release} have no modules"))?;
        let images = [unpacked.join(format!("boot/vmlinuz-{release}")), modules.join("vmlinuz")];
        let image = images.iter().find(|it| it.is_file());
        let image = image.with_context(|| format!("the packages of {release} have no vmlinuz"))?;
        fs::create_dir_all(draft.join("lib/modules"))?;
        fs::copy(image, draft.join("vmlinuz"))?;
        remove(&modules.join("vmlinuz"))?;
        let mut copy = Command::new("cp");
        quiet(copy.arg("-r").arg(modules).arg(draft.join("lib/modules")))?;
        // Installing the packages would run depmod.
        quiet(Command::new(depmod).arg("-b").arg(draft).arg(release))?;
        fs::write(draft.join("release"), release)?;
        Ok(())
    }
}

/// Returns the packages in the `Depends` of a paragraph of apt that are parts of Linux.
fn linux_packages(paragraph: &str) -> impl Iterator<Item = &str> {
    let depends = paragraph.lines().find_map(|line| line.strip_prefix("Depends: "));
    let words = depends.unwrap_or_default().split(", ").filter_map(|it| it.split(' ').next());
    let parts = ["linux-image-", "linux-base-", "linux-binary-", "linux-modules-"];
    words.filter(move |word| parts.iter().any(|part| word.starts_with(part)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_linux_are_found_among_dependencies() {
        let text = "Package: linux-image-7.2.13+deb14-cloud-amd64\nDepends: dracut | linux-initramfs-tool, \
            linux-base-7.2.13+deb14-cloud-amd64 (= 7.2.13-1), linux-binary-7.2.13+deb14-cloud-amd64 (= 7.2.13-1), \
            linux-modules-7.2.13+deb14-cloud-amd64 (= 7.2.13-1)\nRecommends: linux-image-x";
        let found: Vec<_> = linux_packages(text).collect();
        assert_eq!(
            found,
            [
                "linux-base-7.2.13+deb14-cloud-amd64",
                "linux-binary-7.2.13+deb14-cloud-amd64",
                "linux-modules-7.2.13+deb14-cloud-amd64"
            ]
        );
        assert_eq!(linux_packages("Package: x").count(), 0);
    }

    #[test]
    fn a_release_has_a_version() {
        let version = |release: &str| {
            let (release, dir) = (release.to_owned(), PathBuf::new());
            Kernel { release, dir, architecture: Architecture::Amd64 }.version()
        };
        assert_eq!(version("7.2.13+deb14-cloud-amd64"), Some((7, 2)));
        assert_eq!(version("6.1.0-50-cloud-amd64"), Some((6, 1)));
        assert_eq!(version("rolling"), None);
    }
}
