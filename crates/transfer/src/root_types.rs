//! Types of root partitions, which identify the processor architecture of the root.

/// Partition types by architecture, named as in Go. Source: Discoverable Partitions Specification, "Defined Partition
/// Type UUIDs".
pub(crate) const ROOT_TYPES: [(&str, u128); 13] = [
    ("386", 0x44479540_f297_41b2_9af7_d131d5f0458a),
    ("amd64", 0x4f68bce3_e8cd_4db1_96e7_fbcaf984b709),
    ("arm", 0x69dad710_2ce4_4e3c_b16c_21a1d49abed3),
    ("arm64", 0xb921b045_1df0_41c3_af44_4c6f280d3fae),
    ("loong64", 0x77055800_792c_4f94_b39a_98c91b762bb6),
    ("mips", 0xe9434544_6e2c_47cc_bae2_12d6deafb44c),
    ("mips64", 0xd113af76_80ef_41b4_bdb6_0cff4d3d4a25),
    ("mips64le", 0x700bda43_7a34_4507_b179_eeb93d7a7ca3),
    ("mipsle", 0x37c58c8a_d913_4156_a25f_48b1b64e07f0),
    ("ppc64", 0x912ade1d_a839_4913_8964_a10eee08fbd2),
    ("ppc64le", 0xc31c45e6_3f39_412e_80fb_4809c4980599),
    ("riscv64", 0x72ec70a6_cf74_40e6_bd49_4bda08e8f224),
    ("s390x", 0x5eead9a9_fe09_4a1e_a1d7_520d00531306),
];

/// Returns a type as a partition table contains it. Source: UEFI 2.10, appendix A: the first three of a GUID's five
/// parts are little-endian.
pub(crate) fn type_bytes(number: u128) -> [u8; 16] {
    let mut bytes = number.to_be_bytes();
    bytes[..4].reverse();
    bytes[4..6].reverse();
    bytes[6..8].reverse();
    bytes
}
