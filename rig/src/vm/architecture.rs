//! The processors of guests.

/// A processor that QEMU emulates, and for which Debian has kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Architecture {
    Amd64,
    Arm64,
}

impl Architecture {
    /// Returns Debian's name.
    pub(crate) fn debian(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// Returns QEMU's program.
    pub(super) fn qemu(self) -> &'static str {
        match self {
            Self::Amd64 => "qemu-system-x86_64",
            Self::Arm64 => "qemu-system-aarch64",
        }
    }

    /// Returns QEMU's options for the machine and its processor.
    pub(super) fn machine(self) -> [&'static str; 4] {
        match self {
            // All features that QEMU can emulate, except those in which QEMU 7.2 has errors: after an interrupted
            // `cmpxchg16b` the flags are wrong, and the kernel crashes, because it allocates memory with this
            // instruction.
            Self::Amd64 => ["-machine", "pc,accel=tcg", "-cpu", "max,-cx16,-la57"],
            // `max` would authenticate pointers, which takes half of the time.
            Self::Arm64 => ["-machine", "virt,accel=tcg", "-cpu", "cortex-a72"],
        }
    }

    /// Returns QEMU's option that makes the second serial port, for reports.
    pub(super) fn second_port(self) -> [&'static str; 2] {
        match self {
            Self::Amd64 => ["-serial", "chardev:report"],
            // The machine `virt` has one port that the kernel may use.
            Self::Arm64 => ["-device", "pci-serial,chardev=report"],
        }
    }

    /// Returns the kernel's name of the first serial port.
    pub(super) fn console(self) -> &'static str {
        match self {
            Self::Amd64 => "ttyS0",
            Self::Arm64 => "ttyAMA0",
        }
    }

    /// Returns the setting of the guest's script for the second port, if that is not `/dev/ttyS1`.
    pub(super) fn environment(self) -> &'static str {
        match self {
            Self::Amd64 => "",
            Self::Arm64 => "report=/dev/ttyS0\n",
        }
    }
}
