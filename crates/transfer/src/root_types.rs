//! Types of root partitions, and of the partitions that verify them. They identify the processor architecture of the
//! root.

/// Partition types of an architecture.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RootTypes {
    /// Name of the architecture, as in Go.
    pub(crate) architecture: &'static str,
    pub(crate) root: u128,
    /// The hash tree of dm-verity.
    pub(crate) verity: u128,
    /// The signature of the tree's root hash.
    pub(crate) signature: u128,
}

const fn types(architecture: &'static str, root: u128, verity: u128, signature: u128) -> RootTypes {
    RootTypes { architecture, root, verity, signature }
}

/// The types of all architectures. Source: Discoverable Partitions Specification, "Defined Partition Type UUIDs".
pub(crate) const ROOT_TYPES: [RootTypes; 13] = [
    types(
        "386",
        0x44479540_f297_41b2_9af7_d131d5f0458a,
        0xd13c5d3b_b5d1_422a_b29f_9454fdc89d76,
        0x5996fc05_109c_48de_808b_23fa0830b676,
    ),
    types(
        "amd64",
        0x4f68bce3_e8cd_4db1_96e7_fbcaf984b709,
        0x2c7357ed_ebd2_46d9_aec1_23d437ec2bf5,
        0x41092b05_9fc8_4523_994f_2def0408b176,
    ),
    types(
        "arm",
        0x69dad710_2ce4_4e3c_b16c_21a1d49abed3,
        0x7386cdf2_203c_47a9_a498_f2ecce45a2d6,
        0x42b0455f_eb11_491d_98d3_56145ba9d037,
    ),
    types(
        "arm64",
        0xb921b045_1df0_41c3_af44_4c6f280d3fae,
        0xdf3300ce_d69f_4c92_978c_9bfb0f38d820,
        0x6db69de6_29f4_4758_a7a5_962190f00ce3,
    ),
    types(
        "loong64",
        0x77055800_792c_4f94_b39a_98c91b762bb6,
        0xf3393b22_e9af_4613_a948_9d3bfbd0c535,
        0x5afb67eb_ecc8_4f85_ae8e_ac1e7c50e7d0,
    ),
    types(
        "mips",
        0xe9434544_6e2c_47cc_bae2_12d6deafb44c,
        0x7a430799_f711_4c7e_8e5b_1d685bd48607,
        0xbba210a2_9c5d_45ee_9e87_ff2ccbd002d0,
    ),
    types(
        "mips64",
        0xd113af76_80ef_41b4_bdb6_0cff4d3d4a25,
        0x579536f8_6a33_4055_a95a_df2d5e2c42a8,
        0x43ce94d4_0f3d_4999_8250_b9deafd98e6e,
    ),
    types(
        "mips64le",
        0x700bda43_7a34_4507_b179_eeb93d7a7ca3,
        0x16b417f8_3e06_4f57_8dd2_9b5232f41aa6,
        0x904e58ef_5c65_4a31_9c57_6af5fc7c5de7,
    ),
    types(
        "mipsle",
        0x37c58c8a_d913_4156_a25f_48b1b64e07f0,
        0xd7d150d2_2a04_4a33_8f12_16651205ff7b,
        0xc919cc1f_4456_4eff_918c_f75e94525ca5,
    ),
    types(
        "ppc64",
        0x912ade1d_a839_4913_8964_a10eee08fbd2,
        0x9225a9a3_3c19_4d89_b4f6_eeff88f17631,
        0xf5e2c20c_45b2_4ffa_bce9_2a60737e1aaf,
    ),
    types(
        "ppc64le",
        0xc31c45e6_3f39_412e_80fb_4809c4980599,
        0x906bd944_4589_4aae_a4e4_dd983917446a,
        0xd4a236e7_e873_4c07_bf1d_bf6cf7f1c3c6,
    ),
    types(
        "riscv64",
        0x72ec70a6_cf74_40e6_bd49_4bda08e8f224,
        0xb6ed5582_440b_4209_b8da_5ff7c419ea3d,
        0xefe0f087_ea8d_4469_821a_4c2a96a8386a,
    ),
    types(
        "s390x",
        0x5eead9a9_fe09_4a1e_a1d7_520d00531306,
        0xb325bfbe_c7be_4ab8_8357_139e652d2f6b,
        0xc80187a5_73a3_491a_901a_017c3fa953e9,
    ),
];

/// Returns the types of an architecture, named as in Go; `None` if it has none.
pub(crate) fn root_types(architecture: &str) -> Option<&'static RootTypes> {
    ROOT_TYPES.iter().find(|it| it.architecture == architecture)
}

/// Type of an EFI system partition. Source: UEFI 2.10, 5.3.3 "GPT Partition Entry Array".
pub(crate) const ESP: u128 = 0xc12a7328_f81f_11d2_ba4b_00a0c93ec93b;

/// Returns a type as a partition table contains it. Source: UEFI 2.10, appendix A: the first three of a GUID's five
/// parts are little-endian.
pub(crate) fn type_bytes(number: u128) -> [u8; 16] {
    let mut bytes = number.to_be_bytes();
    bytes[..4].reverse();
    bytes[4..6].reverse();
    bytes[6..8].reverse();
    bytes
}
