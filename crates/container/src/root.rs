//! Root file systems: an image of the store, its objects or devices, and optionally a writable layer.

mod acl;
mod assemble;
pub mod filestore;
pub mod headroom;
mod layers;
pub mod limit;
mod make;
mod mount_points;
pub mod mount_service;
pub mod share;
mod tree;
pub mod trust;
pub(crate) mod upper_dir;
mod via;
mod writable_place;

pub use acl::acl_for_ids;
pub use assemble::{BetweenOwners, Root, RootError, Shape, Space};
pub(crate) use layers::{Checked, ImageData, Layers};
pub use make::{MakeRootError, SOURCE, Warm, make, may_have_acl, warm};
pub use tree::{OverlayMark, TreeRootError, name_below_overlay, set_below_overlay};
pub use trust::{PageDomain, Trust, TrustError, TrustedImage, VerityPolicy};
pub use upper_dir::{Doomed, UpperError, Writable};
pub use via::{Above, LendImage, LentMount, ServeImage, ServedImage, Via, WithXattrs};
pub use writable_place::{
    PlaceError, SpaceError, WritableChoice, WritablePlace, space, suits_overlay,
};
