//! Boots a machine with systemd, and tests Quire's units and users who log in.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;

use super::Each;
use super::boot::{self, Machine, Step};
use super::initramfs;
use super::kernels::Kernel;
use super::root::{Draft, GUEST};
use super::{plan_text, work};
use crate::cache::Cache;
use crate::inputs::sid;
use crate::process::{need, quiet, repository, target_dir};

pub(super) const NAME: &str = "systemd";
pub(super) const ABOUT: &str =
    "units, and users in login sessions, where systemd is the first program";

/// Earlier kernels support neither users' images as trees in memory nor volumes.
const SINCE: (u32, u32) = (6, 16);

/// Starts the steps when the system is up. The journal goes to the file of the kernel's messages, for an analysis.
const UNIT: &str = "
[Unit]
After=multi-user.target
[Service]
Type=idle
ExecStart=/bin/sh /vm/guest systemd
StandardOutput=journal+console
[Install]
WantedBy=multi-user.target
";

/// The first program of the disk.
const INIT: &str = "#!/bin/sh\nexec /usr/lib/systemd/systemd\n";

/// Directory below the root, to which units of services have no access because of `ProtectHome`.
const HOMES: &str = "home";

/// Users who log in, with user and group id. One has additional ids from the files; the others have none.
const USERS: [(&str, u32, u32); 4] = [
    ("me", 1000, 1000),
    ("you", 1001, 1001),
    ("other", 1500, 1002),
    // As directory services number users, and as systemd numbers containers.
    ("high", 1_500_000_000, 1003),
];

/// Steps by name, with a limit in seconds. The scripts contain the expected results.
const STEPS: [(&str, u64, &str); 6] = [
    ("units", 180, include_str!("systemd/units.sh")),
    ("mounts", 300, include_str!("systemd/mounts.sh")),
    ("limits", 300, include_str!("systemd/limits.sh")),
    ("storage", 300, include_str!("systemd/storage.sh")),
    ("ids", 300, include_str!("systemd/ids.sh")),
    ("failed", 60, include_str!("systemd/failed.sh")),
];

/// Makes the disk, boots it, and calls `each` with the result of each step.
pub(super) fn test(cache: &Cache, kernel: &Kernel, each: Each<'_>) -> Result<()> {
    if kernel.version().is_none_or(|it| it < SINCE) {
        println!("   LEFT OUT: {NAME}: earlier kernels than Linux 6.16 have no trees for users");
        return Ok(());
    }
    let root = sid::make_booted(cache, false)?.join("root");
    let work = work(cache)?;
    let at = |name: &str| work.path().join(name);
    let [disk, initramfs, copy] = ["disk", "initramfs.cpio", "root"].map(at);
    quiet(Command::new("cp").args(["--archive", "--reflink=auto"]).arg(&root).arg(&copy))?;
    let steps: Vec<_> = STEPS.iter().map(|it| step(it.0, it.1)).collect();
    add(&copy, &steps)?;
    let mut mkfs = Command::new(need("mkfs.ext4")?);
    mkfs.args(["-q", "-F", "-m", "0", "-E", "root_owner=0:0", "-d"]);
    quiet(mkfs.arg(&copy).arg(&disk).arg("2G"))?;
    initramfs::write(kernel, &need("busybox")?, &initramfs::DISK, work.path(), &initramfs)?;
    let machine =
        Machine { disks: &[&disk], memory: 1536, ..Machine::new(kernel, &initramfs, "-systemd")? };
    boot::run(&machine, &steps, each)?;
    Ok(())
}

fn step(name: &str, seconds: u64) -> Step {
    Step {
        name: format!("{NAME}/{name}"),
        limit: Duration::from_secs(seconds),
        command: format!("sh -eux steps/{name}.sh"),
        harness: false,
    }
}

fn append(file: &Path, line: &str) -> Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).open(file)?;
    Ok(file.write_all(line.as_bytes())?)
}

/// Adds files to Debian's root: Quire with its units as it is installed, users, and the steps.
fn add(root: &Path, steps: &[Step]) -> Result<()> {
    let draft = Draft::new(root.to_owned());
    draft.stripped(&target_dir()?.join("debug/quire"), Path::new("/usr/bin/quire"))?;
    std::os::unix::fs::symlink("../bin/quire", root.join("usr/sbin/mount.quire"))?;
    for unit in fs::read_dir(repository().join("dist/systemd"))? {
        let unit = unit?;
        let place = root.join("usr/lib/systemd/system").join(unit.file_name());
        fs::copy(unit.path(), place)?;
    }
    for (name, user, group) in USERS {
        for (file, line) in [
            ("passwd", format!("{name}:x:{user}:{group}::/{HOMES}/{name}:/bin/sh\n")),
            ("shadow", format!("{name}:!:20000:0:99999:7:::\n")),
            ("group", format!("{name}:x:{group}:\n")),
        ] {
            append(&root.join("etc").join(file), &line)?;
        }
        let home = root.join(HOMES).join(name);
        fs::create_dir(&home)?;
        std::os::unix::fs::chown(&home, Some(user), Some(group))?;
    }
    for file in ["subuid", "subgid"] {
        append(&root.join("etc").join(file), "me:100000:65536\n")?;
    }
    draft.text("vm/init", INIT, 0o755)?;
    draft.text("vm/guest", GUEST, 0o755)?;
    draft.text("vm/environment", "", 0o644)?;
    draft.text("vm/plan", &plan_text(steps), 0o644)?;
    for (name, _, script) in STEPS {
        draft.text(&format!("vm/steps/{name}.sh"), script, 0o644)?;
    }
    draft.text("etc/hostname", "quire-vm\n", 0o644)?;
    draft.text("etc/systemd/system/quire-vm.service", UNIT, 0o644)?;
    // The service is not enabled, because a step starts it after testing without it.
    let ids = root.join("etc/systemd/system/sockets.target.wants/systemd-nsresourced.socket");
    let _not_enabled = fs::remove_file(ids);
    // Without udev, systemd would wait for the terminal's device.
    let getty = root.join("etc/systemd/system/serial-getty@ttyS0.service");
    std::os::unix::fs::symlink("/dev/null", getty)?;
    let wants = root.join("etc/systemd/system/multi-user.target.wants");
    fs::create_dir_all(&wants)?;
    std::os::unix::fs::symlink("../quire-vm.service", wants.join("quire-vm.service"))?;
    Ok(())
}
