//! Reads the configuration of this machine's apt, so that the repository contains no address of a mirror, and
//! downloads packages of other Debian releases and machines.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

use crate::Skipped;
use crate::process::{need, quiet};

/// The mirror of the running Debian release, from any of apt's files and in any of their syntaxes.
pub(crate) struct Mirror {
    pub(crate) address: String,
    /// Name of the release, such as `bookworm`.
    pub(crate) codename: String,
}

pub(crate) fn mirror() -> Result<Mirror> {
    let codename = codename()?;
    match choose(&targets()?, &codename) {
        Some(address) => Ok(Mirror { address: address.to_owned(), codename }),
        None => bail!(Skipped(format!("apt has no source for {codename} main"))),
    }
}

/// Returns the line for a list of sources that adds the security updates of the running Debian release.
pub(crate) fn security() -> Result<String> {
    let suite = format!("{}-security", codename()?);
    match choose(&targets()?, &suite) {
        Some(address) => Ok(format!("deb {address} {suite} main")),
        None => bail!(Skipped(format!("apt has no source for {suite} main"))),
    }
}

/// apt with separate lists and sources. It verifies the release's signature and all digests.
pub(crate) struct Apt {
    architecture: String,
    dir: tempfile::TempDir,
}

impl Apt {
    /// Downloads the lists of these releases into `dir`, for one of Debian's architectures.
    pub(crate) fn open(
        dir: tempfile::TempDir,
        suites: &[&str],
        architecture: &str,
    ) -> Result<Self> {
        let mirror = mirror()?;
        for folder in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(dir.path().join(folder))?;
        }
        let key = Path::new("/usr/share/keyrings/debian-archive-keyring.gpg");
        let signed =
            if key.exists() { format!(" signed-by={}", key.display()) } else { String::new() };
        let lines = suites.iter().map(|suite| {
            format!("deb [arch={architecture}{signed}] {} {suite} main\n", mirror.address)
        });
        fs::write(dir.path().join("sources.list"), lines.collect::<String>())?;
        // No package counts as installed.
        fs::write(dir.path().join("status"), "")?;
        let apt = Self { architecture: architecture.to_owned(), dir };
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

    /// Returns the directory of the downloads.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn command(&self, program: &str) -> Result<Command> {
        let mut command = Command::new(need(program)?);
        let dir = self.dir.path();
        for (option, value) in [
            ("Dir::State::Lists", dir.join("lists").display().to_string()),
            ("Dir::State::status", dir.join("status").display().to_string()),
            ("Dir::Cache", dir.join("cache").display().to_string()),
            ("Dir::Etc::SourceList", dir.join("sources.list").display().to_string()),
            ("Dir::Etc::SourceParts", String::from("-")),
            ("Acquire::IndexTargets::deb::DEP-11::DefaultEnabled", String::from("false")),
            // An outdated mirror or a wrong clock is acceptable, because signatures are verified.
            ("Acquire::Check-Valid-Until", String::from("false")),
            ("APT::Architecture", self.architecture.clone()),
            ("APT::Architectures", self.architecture.clone()),
            // The directory is private, so apt must download as root.
            ("APT::Sandbox::User", String::from("root")),
        ] {
            command.args(["-o", &format!("{option}={value}")]);
        }
        command.env("LC_ALL", "C").current_dir(dir);
        Ok(command)
    }

    /// Downloads these packages, and unpacks them below `root`. Their scripts do not run.
    pub(crate) fn unpack(&self, packages: &[&str], root: &Path) -> Result<()> {
        quiet(self.command("apt-get")?.arg("download").args(packages))?;
        extract(self.dir.path(), root)
    }

    /// Does the same with the packages that these depend on.
    pub(crate) fn unpack_all(&self, packages: &[&str], root: &Path) -> Result<()> {
        let mut apt = self.command("apt-get")?;
        apt.args(["-q", "-y", "--no-install-recommends", "--download-only", "install"]);
        quiet(apt.args(packages))?;
        extract(&self.dir.path().join("cache/archives"), root)
    }
}

/// Unpacks the packages in a directory below `root`.
fn extract(from: &Path, root: &Path) -> Result<()> {
    fs::create_dir_all(root)?;
    for entry in fs::read_dir(from)?.collect::<Result<Vec<_>, _>>()? {
        if entry.path().extension().is_some_and(|it| it == "deb") {
            let mut dpkg = Command::new(need("dpkg-deb")?);
            quiet(dpkg.arg("--extract").arg(entry.path()).arg(root))?;
        }
    }
    Ok(())
}

fn targets() -> Result<String> {
    need("apt-get")?;
    let mut apt = Command::new("apt-get");
    apt.args(["indextargets", "--format", "$(RELEASE) $(COMPONENT) $(REPO_URI)"]);
    quiet(apt.arg("Created-By: Packages"))
}

fn choose<'a>(targets: &'a str, codename: &str) -> Option<&'a str> {
    targets.lines().find_map(|line| match line.split(' ').collect::<Vec<_>>()[..] {
        [release, "main", address] if release == codename => Some(address),
        _ => None,
    })
}

fn codename() -> Result<String> {
    let release = fs::read_to_string("/etc/os-release")?;
    match release.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME=")) {
        Some(name) if release.lines().any(|it| it == "ID=debian") => Ok(name.to_owned()),
        _ => bail!(Skipped(String::from("this is no Debian release"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_itself_is_chosen_not_its_updates() {
        let targets = "bookworm-security main http://mirror.example/security/\n\
            bookworm-updates main http://mirror.example/debian/\n\
            bookworm contrib http://mirror.example/other/\n\
            bookworm main http://mirror.example/debian/\n";
        assert_eq!(choose(targets, "bookworm"), Some("http://mirror.example/debian/"));
        assert_eq!(choose(targets, "bookworm-security"), Some("http://mirror.example/security/"));
        assert_eq!(choose(targets, "trixie"), None);
    }
}
