//! Writes the initramfs of a guest: busybox, the modules for the real root, and a script that switches to it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use super::kernels::Kernel;
use super::root::Draft;
use crate::process::{line, need, quiet};

/// Modules that tests need besides the kernel's image. Some kernels have some of them built in.
const MODULES: [&str; 9] = [
    "virtio_pci",
    "virtio_blk",
    "ext4",
    "loop",
    "erofs",
    "overlay",
    "fuse",
    "virtiofs",
    "quota_v2",
];

const INIT: &str = include_str!("initramfs.sh");

/// The method of mounting the real root.
#[derive(Debug)]
pub(crate) struct Way<'a> {
    /// Commands that mount the real root at `/root`, for busybox's shell.
    pub(crate) script: &'a str,
    /// Programs of the host that the script calls.
    pub(crate) programs: &'a [&'a str],
    /// Additional files: their paths and contents.
    pub(crate) files: &'a [(&'a str, &'a str)],
    /// Modules that the script needs besides those of every guest.
    pub(crate) modules: &'a [&'a str],
}

/// The disk that `root::write` makes.
pub(crate) const DISK: Way<'_> =
    Way { script: "mount -t ext4 /dev/vda /root\n", programs: &[], files: &[], modules: &[] };

/// Writes the initramfs for this kernel to `file`. The directory `work` is used for temporary files.
///
/// `busybox` is a static program for the guest's processor.
pub(crate) fn write(
    kernel: &Kernel,
    busybox: &Path,
    way: &Way<'_>,
    work: &Path,
    file: &Path,
) -> Result<()> {
    let mut draft = Draft::new(work.join("initramfs"));
    let root = draft.root().to_owned();
    for dir in ["bin", "proc", "sys", "dev", "modules", "root"] {
        fs::create_dir_all(root.join(dir))?;
    }
    fs::copy(busybox, root.join("bin/busybox"))?;
    draft.text("init", INIT, 0o755)?;
    draft.text("mount-root", way.script, 0o644)?;
    for program in way.programs {
        draft.program(&need(program)?)?;
    }
    for (path, text) in way.files {
        draft.text(path, text, 0o755)?;
    }
    let mut order = String::new();
    for (number, module) in modules(kernel, way.modules)?.iter().enumerate() {
        let name = format!("{number:02}.ko");
        unpack(&kernel.modules().join(module), &root.join("modules").join(&name))
            .with_context(|| format!("cannot unpack the module {module}"))?;
        order += &format!("{name} {module}\n");
    }
    fs::write(root.join("modules/order"), order)?;
    let mut cpio = Command::new(need("cpio")?);
    cpio.args(["--quiet", "--create", "--format=newc", "--owner=0:0"]).current_dir(&root);
    let names = quiet(Command::new("find").arg(".").current_dir(&root))?;
    let list = work.join("initramfs.list");
    fs::write(&list, names)?;
    let status = cpio.stdin(File::open(&list)?).stdout(File::create(file)?).status()?;
    if !status.success() {
        bail!("{}: {status}", line(&cpio));
    }
    Ok(())
}

/// Returns the files of `MODULES`, of these other modules and of their dependencies, in loading order.
fn modules(kernel: &Kernel, others: &[&str]) -> Result<Vec<String>> {
    let read = |name: &str| {
        let path = kernel.modules().join(name);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let wanted: Vec<_> = MODULES.iter().chain(others).copied().collect();
    order(&read("modules.dep")?, &read("modules.builtin")?, &wanted)
        .with_context(|| format!("Linux {}", kernel.release))
}

/// Whether a kernel has a module, or has it built in.
pub(super) fn has_module(kernel: &Kernel, name: &str) -> Result<bool> {
    let lists = ["modules.dep", "modules.builtin"].map(|it| kernel.modules().join(it));
    let has = |list: &Path| -> Result<bool> {
        let text = fs::read_to_string(list)?;
        Ok(text.lines().filter_map(|it| it.split(':').next()).any(|it| module_name(it) == name))
    };
    Ok(has(&lists[0])? || has(&lists[1])?)
}

fn order(dependencies: &str, builtin: &str, wanted: &[&str]) -> Result<Vec<String>> {
    let lines = dependencies.lines().filter_map(|line| line.split_once(':'));
    let needs: BTreeMap<_, _> =
        lines.map(|(file, needs)| (module_name(file), (file, needs))).collect();
    let mut order: Vec<String> = Vec::new();
    for name in wanted {
        let Some((file, needs)) = needs.get(*name) else {
            if builtin.lines().any(|line| module_name(line) == *name) {
                continue;
            }
            bail!("the kernel has no module {name}");
        };
        // depmod lists all dependencies, the nearest first.
        for file in needs.split_whitespace().rev().chain([*file]) {
            if !order.iter().any(|it| it == file) {
                order.push(file.to_owned());
            }
        }
    }
    Ok(order)
}

/// Returns the name of a module from its file: the part before `.ko`, with `-` replaced by `_`.
fn module_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split(".ko").next().unwrap_or(name).replace('-', "_")
}

fn unpack(module: &Path, to: &Path) -> Result<()> {
    let program = match module.extension().and_then(|it| it.to_str()) {
        Some("ko") => "cat",
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => bail!("it is packed in an unknown way"),
    };
    let mut command = Command::new(need(program)?);
    if program != "cat" {
        command.args(["-d", "-c"]);
    }
    let status = command.arg(module).stdin(Stdio::null()).stdout(File::create(to)?).status()?;
    if !status.success() {
        bail!("{}: {status}", line(&command));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_after_what_they_need() {
        let dependencies = "kernel/fs/a-b.ko.xz: kernel/lib/near.ko.xz kernel/lib/far.ko.xz\n\
            kernel/lib/near.ko.xz: kernel/lib/far.ko.xz\nkernel/lib/far.ko.xz:\nkernel/fs/other.ko:\n";
        let found = order(dependencies, "kernel/fs/in.ko\n", &["other", "in", "a_b", "near"]);
        assert_eq!(
            found.unwrap(),
            [
                "kernel/fs/other.ko",
                "kernel/lib/far.ko.xz",
                "kernel/lib/near.ko.xz",
                "kernel/fs/a-b.ko.xz"
            ]
        );
        let error = order(dependencies, "", &["in"]).unwrap_err();
        assert_eq!(error.to_string(), "the kernel has no module in");
    }
}
