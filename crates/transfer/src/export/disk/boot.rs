//! The boot program of a disk: a unified kernel image (UKI), which contains the kernel, its initrd and a command line
//! with the root hash.
//!
//! Source: UAPI Group Specifications, "Unified Kernel Image".

use image::dm_verity::RootHash;

pub use super::pe::StubError;
use super::pe::{NewSection, add_sections, check_stub};

/// Maximum length of the kernel, the initrds and the stub together, in bytes. They are kept in memory.
const BOOT_MAX: usize = 1 << 30;
/// Maximum length of a command line in bytes, that of Linux on most processors. Source: `COMMAND_LINE_SIZE`.
const COMMAND_LINE_MAX: usize = 2048;
/// Maximum number of sections that a stub gets.
const SECTIONS: usize = 5;
/// Beginnings of parameters that choose the root, or decide whether and how it is verified. systemd prefers some of them
/// to `roothash=`. Source: systemd-fstab-generator(8) and systemd-veritysetup-generator(8).
const CHOOSE_ROOT: [&str; 6] =
    ["root=", "roothash=", "usrhash=", "systemd.verity", "rd.systemd.verity", "rd.veritysetup"];
/// Alignment of an initrd behind others. Source: Linux `Documentation/driver-api/early-userspace/buffer-format.rst`.
const INITRD_ALIGN: usize = 4;

/// A processor whose disks can boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Machine {
    /// Name of the architecture, as in Go.
    architecture: &'static str,
    /// Number in PE headers.
    number: u16,
    /// Name of the boot program, as a directory entry contains it.
    file: &'static [u8; 11],
}

/// Source: UEFI 2.10, 3.5.1.1 "Removable Media Boot Behavior"; Microsoft's PE format, "Machine Types".
const MACHINES: [Machine; 2] = [
    Machine { architecture: "amd64", number: 0x8664, file: b"BOOTX64 EFI" },
    Machine { architecture: "arm64", number: 0xaa64, file: b"BOOTAA64EFI" },
];

/// The reason why a disk cannot boot with these files.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BootError {
    #[error("disks for {0} cannot boot: only those for amd64 and arm64 can")]
    Architecture(String),
    #[error("the stub cannot be used")]
    Stub(#[source] StubError),
    #[error("the kernel is empty")]
    NoKernel,
    #[error("the kernel, the initrds and the stub have more than 1 GiB")]
    TooLarge,
    #[error("the command line has {reason}")]
    CommandLine { reason: &'static str },
}

/// The files of a boot program.
#[derive(Debug, Clone, Default)]
pub struct BootFiles {
    /// The program that starts the kernel, of systemd.
    pub stub: Vec<u8>,
    pub kernel: Vec<u8>,
    /// The initrds, of which the kernel unpacks one after the other.
    pub initrds: Vec<Vec<u8>>,
    /// The kernel's command line, without the root hash.
    pub command_line: String,
}

/// The parts of a boot program that do not depend on the image.
#[derive(Debug)]
pub struct BootProgram {
    machine: Machine,
    stub: Vec<u8>,
    kernel: Vec<u8>,
    initrd: Vec<u8>,
    command_line: String,
}

impl BootProgram {
    /// Checks the files of a boot program for this architecture, named as in Go.
    ///
    /// # Errors
    /// A [`BootError`].
    pub fn new(architecture: &str, files: BootFiles) -> Result<Self, BootError> {
        let machine = MACHINES.iter().find(|it| it.architecture == architecture);
        let machine = *machine.ok_or_else(|| BootError::Architecture(architecture.to_owned()))?;
        let BootFiles { stub, kernel, initrds, command_line } = files;
        if kernel.is_empty() {
            return Err(BootError::NoKernel);
        }
        let lengths = initrds.iter().map(Vec::len).chain([stub.len(), kernel.len()]);
        if lengths.fold(0, usize::saturating_add) > BOOT_MAX {
            return Err(BootError::TooLarge);
        }
        let refused = |reason| Err(BootError::CommandLine { reason });
        if command_line.len() > COMMAND_LINE_MAX - 128 {
            return refused("more than 1920 bytes");
        }
        if command_line.chars().any(char::is_control) {
            return refused("control characters");
        }
        // Firmware and systemd read other characters in different ways.
        if !command_line.is_ascii() {
            return refused("characters that are not ASCII");
        }
        // systemd removes quotes anywhere in a word.
        if command_line.contains(['"', '\'', '\\']) {
            return refused(
                "quotes or backslashes, with which it could hide a parameter for the root",
            );
        }
        let mut words = command_line.split(' ');
        if words.any(|word| CHOOSE_ROOT.iter().any(|it| word.starts_with(it))) {
            return refused(
                "a parameter that chooses the root or its verification, such as root= or systemd.verity=: the root \
                hash that Quire adds chooses both",
            );
        }
        let mut initrd = Vec::new();
        for it in initrds {
            initrd.resize(initrd.len().next_multiple_of(INITRD_ALIGN), 0);
            initrd.extend(it);
        }
        let program = Self { machine, stub, kernel, initrd, command_line };
        // Finds a stub that cannot be used before the image is written.
        check_stub(&program.stub, machine.number, SECTIONS).map_err(BootError::Stub)?;
        Ok(program)
    }

    /// Returns the name of the boot program.
    pub(super) fn file(&self) -> &'static [u8; 11] {
        self.machine.file
    }

    /// Returns the boot program for an image with this root hash, and with this `os-release`.
    pub(super) fn make(
        &self,
        root: &RootHash,
        os_release: Option<&[u8]>,
    ) -> Result<Vec<u8>, BootError> {
        let mut command_line = format!("roothash={root}");
        if !self.command_line.is_empty() {
            command_line += " ";
            command_line += &self.command_line;
        }
        let data = |name, content| NewSection { name, content, is_code: false };
        let mut sections = Vec::new();
        sections.extend(os_release.map(|it| data(".osrel", it)));
        sections.push(data(".cmdline", command_line.as_bytes()));
        let version = kernel_version(&self.kernel);
        sections.extend(version.map(|it| data(".uname", it)));
        if !self.initrd.is_empty() {
            sections.push(data(".initrd", &self.initrd));
        }
        // The last one, as kernels that unpack themselves in place need.
        sections.push(NewSection { name: ".linux", content: &self.kernel, is_code: true });
        add_sections(&self.stub, self.machine.number, &sections).map_err(BootError::Stub)
    }
}

/// Returns the release of a kernel for x86, as `uname -r` prints it. Source: Linux `Documentation/arch/x86/boot.rst`,
/// `kernel_version`.
fn kernel_version(kernel: &[u8]) -> Option<&[u8]> {
    if kernel.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let place = kernel.get(0x20e..0x210)?;
    let place = usize::from(u16::from_le_bytes(place.try_into().ok()?));
    if place == 0 {
        return None;
    }
    let text = kernel.get(place + 0x200..)?;
    let length = text.iter().take(256).position(|it| matches!(it, 0 | b' '))?;
    let version = text.get(..length).filter(|it| it.iter().all(u8::is_ascii_graphic));
    version.filter(|it| !it.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_those_of_the_setup_header() {
        let kernel = |place: u16, text: &[u8]| {
            let mut kernel = vec![0; 0x400];
            kernel[0x202..0x206].copy_from_slice(b"HdrS");
            kernel[0x20e..0x210].copy_from_slice(&place.to_le_bytes());
            kernel[0x300..0x300 + text.len()].copy_from_slice(text);
            kernel
        };
        for (place, text, expect) in [
            (0x100, &b"6.1.0-1-amd64 (a@b) #1"[..], Some(&b"6.1.0-1-amd64"[..])),
            (0x100, b"6.1", Some(b"6.1")),
            (0x100, b"", None),
            (0x100, b"\x1b[0m", None),
            (0x100, &[b'a'; 0x100], None),
            (0, b"6.1", None),
            (0xffff, b"6.1", None),
        ] {
            assert_eq!(kernel_version(&kernel(place, text)), expect, "{text:?}");
        }
        assert_eq!(kernel_version(b"short"), None);
        assert_eq!(kernel_version(&[0; 0x400]), None);
    }

    #[test]
    fn files_that_cannot_boot_have_a_reason() {
        let files = |change: &dyn Fn(&mut BootFiles)| {
            let mut files = BootFiles { kernel: vec![1], ..BootFiles::default() };
            change(&mut files);
            BootProgram::new("amd64", files).unwrap_err().to_string()
        };
        assert_eq!(files(&|_| ()), "the stub cannot be used");
        assert_eq!(files(&|it| it.kernel.clear()), "the kernel is empty");
        for (line, expect) in [
            ("a\nb", "the command line has control characters"),
            ("a=\u{e4}", "the command line has characters that are not ASCII"),
        ] {
            assert_eq!(files(&|it| line.clone_into(&mut it.command_line)), expect);
        }
        for line in [
            "quiet roothash=1",
            "root=PARTLABEL=root rootfstype=erofs ro",
            "usrhash=1",
            "systemd.verity=no",
            "systemd.verity_root_options=ignore-corruption",
            "rd.systemd.verity=0",
        ] {
            let error = files(&|it| line.clone_into(&mut it.command_line));
            assert!(error.contains("chooses the root"), "{line}: {error}");
        }
        for line in ["\"roothash=1\"", "ro\"othash=1\"", "'root=a'", "a\\b"] {
            let error = files(&|it| line.clone_into(&mut it.command_line));
            assert!(error.contains("quotes"), "{line}: {error}");
        }
        let long = "a".repeat(1921);
        let found = files(&|it| long.clone_into(&mut it.command_line));
        assert_eq!(found, "the command line has more than 1920 bytes");
        let error = BootProgram::new("s390x", BootFiles::default()).unwrap_err();
        assert!(error.to_string().starts_with("disks for s390x cannot boot"), "{error}");
    }
}
