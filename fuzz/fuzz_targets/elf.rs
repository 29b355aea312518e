#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _has_loader = targets::elf(bytes);
});
