#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _has_spans = targets::zstd_span(bytes);
});
