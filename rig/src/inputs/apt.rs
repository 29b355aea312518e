//! Reads the configuration of this machine's apt, so that the repository contains no address of a mirror.

use std::fs;
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
