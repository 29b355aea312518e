//! Checks the files of an image that is a guest's root against the result of another reader.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::boot::Step;
use super::{plan_text, root};
use crate::process::{need, quiet};

/// Reads a layout without Quire.
const EXPECTED: &str = include_str!("contents.py");

/// Mounts an image at `/lower` below a writable layer, in the shell of the initramfs.
pub(super) const OVER_IT: &str = r"
mount -t tmpfs tmpfs /upper
mkdir /upper/files /upper/work
cp -r /vm /upper/files/vm
cp /bin/busybox /upper/files/vm/busybox
mkdir /upper/files/vm/image
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /root
mount --move /lower /root/vm/image
";

/// Compares names, kinds, owners and times in the current directory with the expected ones, and prints only
/// differences.
pub(super) const NAMES: &str = "find . -type d -printf 'd %m %U %G %T@ %p\\n' \
     -o -type f -printf 'f %n %s %m %U %G %T@ %p\\n' -o -type l -printf 'l %n %m %U %G %T@ %p -> %l\\n' \
     -o -printf '%y %n %m %U %G %T@ %p\\n' | LC_ALL=C sort | diff /vm/files -";

/// Steps by name, with a limit in seconds and a command that uses programs of the image. They print only differences
/// from the expected result.
const STEPS: [(&str, u64, &str); 2] = [
    ("names-kinds-owners-times", 300, NAMES),
    ("digests", 600, "sha256sum --check --strict --quiet /vm/digests"),
];

/// The expected contents of a layout's image.
#[derive(Debug)]
pub(super) struct Contents {
    files: String,
    digests: String,
}

impl Contents {
    /// Reads a layout. The directory `work` gets two files.
    pub(super) fn from_layout(layout: &Path, work: &Path) -> Result<Self> {
        let [files, digests] = ["files", "digests"].map(|name| work.join(name));
        let mut python = Command::new(need("python3")?);
        quiet(python.args(["-c", EXPECTED]).arg(layout).arg(&files).arg(&digests))?;
        let [files, digests] = [fs::read_to_string(files)?, fs::read_to_string(digests)?];
        Ok(Self { files, digests })
    }

    /// Returns the digests of all files, as sha256sum(1) prints them.
    pub(super) fn digests(&self) -> &str {
        &self.digests
    }

    /// Returns the additional files of the initramfs for these steps.
    pub(super) fn files<'a>(&'a self, plan: &'a str) -> [(&'static str, &'a str); 5] {
        [
            ("vm/init", root::GUEST),
            ("vm/plan", plan),
            ("vm/environment", ""),
            ("vm/files", &self.files),
            ("vm/digests", &self.digests),
        ]
    }
}

/// Returns the steps of a test with this name, and the plan for the guest. The first step checks that the mount at
/// `/vm/image` matches `mounted` and is read-only.
pub(super) fn steps(test: &str, mounted: &str) -> (Vec<Step>, String) {
    let first = format!(
        ". /etc/os-release && test \"$ID\" = debian && grep -q '{mounted}' /proc/mounts && \
         touch /new && test ! -e image/new && ! touch image/new 2>/dev/null"
    );
    let first = ("is-the-root", 60, first);
    let others =
        STEPS.map(|(name, seconds, command)| (name, seconds, format!("cd image && {command}")));
    let steps = [first].into_iter().chain(others).map(|(name, seconds, command)| Step {
        name: format!("{test}/{name}"),
        limit: Duration::from_secs(seconds),
        command,
        harness: false,
    });
    let steps: Vec<_> = steps.collect();
    let plan = plan_text(&steps);
    (steps, plan)
}
