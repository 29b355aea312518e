//! Finds kernels to boot: Debian's, downloaded with apt and kept in the cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail};

use crate::Skipped;
use crate::cache::{Cache, remove};
use crate::inputs::apt;
use crate::process::{need, quiet};

/// Names of kernels, the Debian releases whose current kernel they denote, and descriptions.
pub(crate) const NAMES: [(&str, &str, &str); 3] = [
    ("newest", "sid", "Debian's newest kernel; it moves"),
    ("lts", "trixie", "the kernel of Debian 13, 6.12"),
    ("oldest", "bookworm", "the kernel of Debian 12, 6.1"),
];

/// The package that depends on a release's current kernel for virtual machines.
const CURRENT: &str = "linux-image-cloud-amd64";

/// Time for which a kernel in the cache counts as current.
const FRESH: Duration = Duration::from_secs(24 * 60 * 60);

/// A kernel in the cache.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    /// Release, as printed by `uname -r`.
    pub(crate) release: String,
    pub(super) dir: PathBuf,
}

impl Kernel {
    fn open(dir: PathBuf) -> Result<Self> {
        let release = fs::read_to_string(dir.join("release"))?;
        Ok(Self { release, dir })
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
pub(crate) fn find_kernel(cache: &Cache, wanted: &str, refresh: bool) -> Result<Kernel> {
    let entry = format!("linux-{wanted}");
    let kept = Kernel::open(cache.dir().join(&entry)).ok();
    let moves = NAMES.iter().any(|it| it.0 == wanted);
    if let Some(kept) = &kept
        && !refresh
        && (!moves || is_fresh(&kept.dir))
    {
        return Ok(kept.clone());
    }
    let found = Apt::open(cache, wanted).and_then(|apt| {
        let package = apt.package()?;
        if let Some(kept) = &kept
            && package.ends_with(&format!("linux-image-{}", kept.release))
        {
            fs::write(kept.dir.join("release"), &kept.release)?;
            return Ok(kept.dir.clone());
        }
        cache.entry(&entry, true, |draft| apt.fetch(&package, draft))
    });
    match (found, kept) {
        (Ok(dir), _) => Kernel::open(dir),
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

/// apt with separate lists and sources. It verifies the release's signature and all digests.
struct Apt<'a> {
    wanted: &'a str,
    dir: tempfile::TempDir,
}

impl<'a> Apt<'a> {
    fn open(cache: &Cache, wanted: &'a str) -> Result<Self> {
        let mirror = apt::mirror()?;
        let dir = super::work(cache)?;
        for folder in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(dir.path().join(folder))?;
        }
        let suites: Vec<&str> = match NAMES.iter().find(|it| it.0 == wanted) {
            Some((_, suite, _)) => vec![*suite],
            None => NAMES.iter().map(|it| it.1).collect(),
        };
        let key = Path::new("/usr/share/keyrings/debian-archive-keyring.gpg");
        let signed =
            if key.exists() { format!(" signed-by={}", key.display()) } else { String::new() };
        let lines = suites
            .iter()
            .map(|suite| format!("deb [arch=amd64{signed}] {} {suite} main\n", mirror.address));
        fs::write(dir.path().join("sources.list"), lines.collect::<String>())?;
        let apt = Self { wanted, dir };
        // `update` succeeds even if it could not download anything, so the lists are counted.
        quiet(apt.command("apt-get")?.arg("update"))?;
        let lists = fs::read_dir(apt.dir.path().join("lists"))?.filter_map(Result::ok);
        let count =
            lists.filter(|it| it.file_name().to_string_lossy().contains("_Packages")).count();
        if count < suites.len() {
            bail!(Skipped(format!("apt's mirror does not answer for {}", suites.join(" and "))));
        }
        Ok(apt)
    }

    fn command(&self, program: &str) -> Result<Command> {
        let mut command = Command::new(need(program)?);
        let dir = self.dir.path();
        for (option, value) in [
            ("Dir::State::Lists", dir.join("lists").display().to_string()),
            ("Dir::Cache", dir.join("cache").display().to_string()),
            ("Dir::Etc::SourceList", dir.join("sources.list").display().to_string()),
            ("Dir::Etc::SourceParts", String::from("-")),
            ("Acquire::IndexTargets::deb::DEP-11::DefaultEnabled", String::from("false")),
            // An outdated mirror or a wrong clock is acceptable, because signatures are verified.
            ("Acquire::Check-Valid-Until", String::from("false")),
            ("APT::Architecture", String::from("amd64")),
            ("APT::Architectures", String::from("amd64")),
            // The directory is private, so apt must download as root.
            ("APT::Sandbox::User", String::from("root")),
        ] {
            command.args(["-o", &format!("{option}={value}")]);
        }
        command.env("LC_ALL", "C").current_dir(dir);
        Ok(command)
    }

    /// Returns the name of the requested kernel's package.
    fn package(&self) -> Result<String> {
        if NAMES.iter().any(|it| it.0 == self.wanted) {
            let found =
                self.depends(CURRENT)?.into_iter().find(|it| it.starts_with("linux-image-"));
            return found.with_context(|| format!("{CURRENT} depends on no linux-image"));
        }
        let names = quiet(self.command("apt-cache")?.args(["pkgnames", "linux-image-"]))?;
        let wanted = format!("linux-image-{}", self.wanted);
        let mut found: Vec<_> = names
            .lines()
            .filter(|it| it.starts_with(&wanted) && it.ends_with("-cloud-amd64"))
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
        let mut show = self.command("apt-cache")?;
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
        quiet(self.command("apt-get")?.arg("download").args(&packages))?;
        let (unpacked, depmod) = (self.dir.path().join("unpacked"), need("depmod")?);
        for entry in fs::read_dir(self.dir.path())?.collect::<Result<Vec<_>, _>>()? {
            if entry.path().extension().is_some_and(|it| it == "deb") {
                let mut dpkg = Command::new(need("dpkg-deb")?);
                quiet(dpkg.arg("--extract").arg(entry.path()).arg(&unpacked))?;
            }
        }
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
        let version =
            |release: &str| Kernel { release: release.to_owned(), dir: PathBuf::new() }.version();
        assert_eq!(version("7.2.13+deb14-cloud-amd64"), Some((7, 2)));
        assert_eq!(version("6.1.0-50-cloud-amd64"), Some((6, 1)));
        assert_eq!(version("rolling"), None);
    }
}
