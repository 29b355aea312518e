//! `serve`: reads the settings of each service. The crate `serve` implements the services.

#[cfg(feature = "serve")]
pub(crate) mod engine_version;
#[cfg(feature = "serve")]
pub(crate) mod engines;
#[cfg(feature = "serve")]
pub(crate) mod lazy;
#[cfg(feature = "serve")]
pub(crate) mod mounts;
#[cfg(feature = "serve")]
pub(crate) mod notify;
#[cfg(feature = "serve")]
pub(crate) mod registry;
#[cfg(feature = "serve")]
pub(crate) mod rootfs;
pub(crate) mod serve;
#[cfg(feature = "serve")]
pub(crate) mod service_config;
#[cfg(feature = "serve")]
pub(crate) mod snapshotter;
#[cfg(feature = "serve")]
pub(crate) mod storage;
