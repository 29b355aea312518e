//! Files with settings: those of options, and those of the user.

pub(crate) mod option_file;
#[cfg(feature = "serve")]
pub(crate) mod settings_file;
pub(crate) mod user_config;
