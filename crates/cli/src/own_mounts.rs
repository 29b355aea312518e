//! Mounts of images, as the kernel's table has them.

use anyhow::Context as _;
use container::root::SOURCE;
use kernel::mount::Mounted;

/// The name of the image of a mount, of an overlay.
pub(crate) fn image_of(mount: &Mounted) -> Option<&str> {
    mount.source.strip_prefix(SOURCE)
}

/// Overlays have the name that we gave them. EROFS says what the kernel opened: a descriptor, which only who mounts
/// by the new mount calls has for a source, or a loop device, whose file then has an image's name.
pub(crate) fn is_ours(mount: &Mounted) -> bool {
    if mount.source.starts_with(SOURCE) {
        return true;
    }
    if mount.kind != "erofs" {
        return false;
    }
    let Some(device) = mount.source.strip_prefix("/dev/loop") else {
        return mount.source.starts_with("/proc/self/fd/");
    };
    let file = std::fs::read_to_string(format!("/sys/block/loop{device}/loop/backing_file"));
    let name = file.unwrap_or_default();
    let name = name.trim_end().rsplit('/').next().unwrap_or_default();
    image::verity::ImageId::from_hex(name.as_bytes()).is_ok()
}

/// All that is mounted where this process can see it.
pub(crate) fn all_mounted() -> anyhow::Result<Vec<Mounted>> {
    kernel::mount::mounted().context("cannot read mountinfo")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_ours() {
        let cases = [
            ("ext3", "/dev/root", false),
            ("overlay", "quire:y:1", true),
            ("erofs", "/proc/self/fd/5", true),
            ("erofs", "/dev/sda1", false),
        ];
        for (kind, source, expect) in cases {
            let (kind, source) = (kind.to_owned(), source.to_owned());
            let mount = Mounted { point: "/mnt".into(), device: "0:52".to_owned(), kind, source };
            assert_eq!(is_ours(&mount), expect, "{mount:?}");
        }
    }
}
