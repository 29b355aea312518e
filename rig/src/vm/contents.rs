//! What a guest has to find in an image that is its root, as another reader than ours says.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::boot::Step;
use super::{plan_text, root};
use crate::process::{need, quiet};

/// Reads a layout without us.
const EXPECTED: &str = include_str!("contents.py");

/// What mounts an image that is at `/lower` below something that can be written to, for the first root's shell.
pub(super) const OVER_IT: &str = r"
mount -t tmpfs tmpfs /upper
mkdir /upper/files /upper/work
cp -r /vm /upper/files/vm
cp /bin/busybox /upper/files/vm/busybox
mkdir /upper/files/vm/image
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /root
mount --move /lower /root/vm/image
";

/// By name, with seconds, what the guest does with programs of the image. What is said without a word is as expected.
const STEPS: [(&str, u64, &str); 2] = [
    (
        "names-kinds-owners-times",
        300,
        "cd image && find . -type d -printf 'd %m %U %G %T@ %p\\n' -o -type f -printf 'f %n %s %m %U %G %T@ %p\\n' \
         -o -type l -printf 'l %n %m %U %G %T@ %p -> %l\\n' -o -printf '%y %n %m %U %G %T@ %p\\n' \
         | LC_ALL=C sort | diff /vm/files -",
    ),
    ("digests", 600, "cd image && sha256sum --check --strict --quiet /vm/digests"),
];

/// What a layout's image has.
#[derive(Debug)]
pub(super) struct Contents {
    files: String,
    digests: String,
}

impl Contents {
    /// Reads a layout; the folder `work` gets two files.
    pub(super) fn of(layout: &Path, work: &Path) -> Result<Self> {
        let [files, digests] = ["files", "digests"].map(|name| work.join(name));
        let mut python = Command::new(need("python3")?);
        quiet(python.args(["-c", EXPECTED]).arg(layout).arg(&files).arg(&digests))?;
        let [files, digests] = [fs::read_to_string(files)?, fs::read_to_string(digests)?];
        Ok(Self { files, digests })
    }

    /// What the first root needs besides, for these steps.
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

/// The steps of a test of this name, and the plan for the guest. In the first, the mount at `/vm/image` is what `mounted`
/// says, and can not be written to.
pub(super) fn steps(test: &str, mounted: &str) -> (Vec<Step>, String) {
    let first = format!(
        ". /etc/os-release && test \"$ID\" = debian && grep -q '{mounted}' /proc/mounts && \
         touch /new && test ! -e image/new && ! touch image/new 2>/dev/null"
    );
    let first = ("is-the-root", 60, &*first);
    let steps = [first].into_iter().chain(STEPS).map(|(name, seconds, command)| Step {
        name: format!("{test}/{name}"),
        limit: Duration::from_secs(seconds),
        command: command.to_owned(),
        harness: false,
    });
    let steps: Vec<_> = steps.collect();
    let plan = plan_text(&steps);
    (steps, plan)
}
