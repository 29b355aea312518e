//! Name services of a statically linked binary.
#![cfg_attr(
    all(target_env = "gnu", target_feature = "crt-static"),
    expect(unsafe_code, reason = "the C library's configuration")
)]

/// In a static binary, makes the C library resolve host names by /etc/hosts and DNS only, whatever /etc/nsswitch.conf
/// says. Otherwise it would load the host's modules, which may belong to another version of the C library and crash.
/// Call it before a second thread starts. Does nothing in a dynamically linked binary.
///
/// Source: glibc `nss/nss.h`, `__nss_configure_lookup`; `files` and `dns` are part of the library since 2.34.
pub fn use_own_name_services() {
    #[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
    {
        use std::ffi::{CStr, c_char, c_int};

        unsafe extern "C" {
            /// Replaces the services of a database. Fails only for an unknown database.
            fn __nss_configure_lookup(database: *const c_char, services: *const c_char) -> c_int;
        }

        const SERVICES: [(&CStr, &CStr); 3] =
            [(c"hosts", c"files dns"), (c"passwd", c"files"), (c"group", c"files")];
        for (database, services) in SERVICES {
            // SAFETY: both texts end with a zero byte, and the call keeps only copies of them.
            let _is_known = unsafe { __nss_configure_lookup(database.as_ptr(), services.as_ptr()) };
        }
    }
}
