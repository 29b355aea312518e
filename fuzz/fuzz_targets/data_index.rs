#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| quire_fuzz::data_index(bytes));
