"""The datasets of the papers: where they come from and how they are prepared."""

from dataclasses import dataclass

Channels = tuple[float, ...]

_HALF: Channels = (0.5, 0.5, 0.5)
_DOMAINNET = "wltjr1007/DomainNet"
_LAY_OUT = "and pass dataset.name=PATH dataset.size=224 with PATH laid out"


@dataclass(frozen=True)
class Entry:
    """One dataset: a hub id, a folder a package manager installs, or files to fetch by hand."""

    title: str
    classes: int
    images: int | None = None  # in all pooled splits, where known
    size: int = 224  # images become size x size
    domains: int = 0  # or sites; 0: none
    hub: str | None = None
    config: str | None = None  # which configuration of the hub dataset
    mean: Channels = (0.485, 0.456, 0.406)  # ImageNet's, usual for photos
    std: Channels = (0.229, 0.224, 0.225)
    image_column: str | None = None  # none: found by type
    label_column: str | None = "label"
    domain_column: str | None = None
    splits: tuple[str, ...] = ()  # the source splits that are pooled; empty: all
    names: tuple[str, ...] = ()  # class names, where the source has numbers
    keep: tuple[str, ...] = ()  # a subset of the source's classes
    folder: str | None = None  # idx files, used instead of the hub where they exist
    manual: str | None = None  # what to fetch and how to lay it out
    test: int = 0  # images of the official test set, where known


_FASHION = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_DOMAINNET_10 = (
    "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
)  # fmt: skip

CATALOGUE: dict[str, Entry] = {
    "digits": Entry("Handwritten digits of scikit-learn", 10, 1_797, 32, mean=_HALF, std=_HALF),
    "mnist": Entry("MNIST", 10, 70_000, 32, hub="ylecun/mnist", mean=(0.1307,) * 3, std=(0.3081,) * 3, test=10_000),
    "fashion-mnist": Entry(
        "Fashion-MNIST", 10, 70_000, 32, hub="zalando-datasets/fashion_mnist", mean=(0.2860,) * 3, std=(0.3530,) * 3,
        names=_FASHION, test=10_000,
        folder="/usr/share/datasets/fashion-mnist",  # Debian's package dataset-fashion-mnist
    ),
    "notmnist": Entry(  # its hand-cleaned part
        "notMNIST (letters A to J)", 10, 18_750, 32, hub="anubhavmaity/notMNIST", mean=_HALF, std=_HALF,
        label_column=None, names=tuple("ABCDEFGHIJ"),
    ),
    "svhn": Entry(  # without the 531,131 easier images of its third split, extra
        "Street View House Numbers", 10, 99_289, 32, hub="ufldl-stanford/svhn", config="cropped_digits",
        mean=(0.4377, 0.4438, 0.4728), std=(0.1980, 0.2010, 0.1970), splits=("train", "test"), test=26_032,
    ),
    "cifar10": Entry(
        "CIFAR-10", 10, 60_000, 32, hub="uoft-cs/cifar10", image_column="img",
        mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616), test=10_000,
    ),
    "cifar100": Entry(  # the 20 superclasses are its domains
        "CIFAR-100", 100, 60_000, 32, 20, hub="uoft-cs/cifar100", image_column="img", label_column="fine_label",
        domain_column="coarse_label", mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762), test=10_000,
    ),
    "tiny-imagenet": Entry(  # classes are WordNet ids
        "Tiny-ImageNet", 200, 110_000, 64, hub="zh-plus/tiny-imagenet",
        mean=(0.4802, 0.4481, 0.3975), std=(0.2302, 0.2265, 0.2262),
    ),
    "caltech101": Entry("Caltech-101", 101, 8_677, hub="flwrlabs/caltech101"),  # without the background class
    "dtd": Entry("Describable Textures", 47, 5_640, hub="tanganke/dtd"),
    "eurosat": Entry("EuroSAT, RGB", 10, 27_000, 64, hub="blanchon/EuroSAT_RGB"),
    "fgvc-aircraft": Entry(  # the columns family and manufacturer are coarser classes
        "FGVC-Aircraft, variants", 100, 10_000, hub="HuggingFaceM4/FGVC-Aircraft", label_column="variant",
    ),
    "food101": Entry("Food-101", 101, 101_000, hub="ethz/food101"),
    "flowers102": Entry("Oxford Flowers-102", 102, 8_189, hub="dpdl-benchmark/oxford_flowers102"),
    "oxford-pets": Entry("Oxford-IIIT Pets", 37, 7_349, hub="timm/oxford-iiit-pet"),
    "stanford-cars": Entry("Stanford Cars", 196, 16_185, hub="tanganke/stanford_cars"),
    "ucf101": Entry(
        "UCF-101, middle frames", 101, 13_320,
        manual=f"get the UCF-101 videos, save the middle frame of each, {_LAY_OUT} class/*.jpg",
    ),
    "office-caltech10": Entry(
        "Office-Caltech10", 10, 2_533, domains=4,
        manual=f"get the images of the 10 classes that Office-31 and Caltech-256 share, {_LAY_OUT} domain/class/*.jpg "
        "with the domains amazon, caltech, dslr and webcam",
    ),
    "domainnet": Entry(  # its cache takes 88 GB at this size
        "DomainNet", 345, 586_575, domains=6, hub=_DOMAINNET, domain_column="domain",
    ),
    "domainnet-10": Entry(
        "DomainNet, the 10 classes of federated studies", 10, domains=6, hub=_DOMAINNET, domain_column="domain",
        keep=_DOMAINNET_10,
    ),
    "ham10000": Entry(  # its validation and test splits repeat images of train
        "HAM10000, skin lesions", 7, hub="marmal88/skin_cancer", image_column="image", label_column="dx",
        splits=("train",),
    ),
    "msk": Entry(
        "MSK, skin lesions of the ISIC archive (Dermoscopic-FL)", 2,
        manual=f"get the MSK collections from the ISIC archive with their diagnoses, {_LAY_OUT} class/*.jpg, "
        "or client/{train,test}/class/*.jpg together with other collections as clients",
    ),
    "dermoscopic-fl": Entry(
        "Dermoscopic-FL: four sites of HAM10000 and MSK, three lesions", 3, 10_490, domains=4,
        manual=f"get HAM10000 and the MSK collections with their diagnoses, {_LAY_OUT} "
        "client/{train,test}/class/*.jpg",
    ),
    "five-dataset": Entry(
        "SVHN, CIFAR-10, notMNIST, Fashion-MNIST and MNIST as one", 50, 318_039, domains=5,
        manual=f"save the images of the five datasets, {_LAY_OUT} domain/class/*.png with fifty different class names",
    ),
    # clip-mini was pre-trained on drawings like the first, and has never seen the second
    "shapes": Entry("Drawn shapes in eight styles", 16, 9_600, 32, 8, mean=_HALF, std=_HALF),
    "parts": Entry("Drawn machine parts before eight cameras", 16, 3_840, 32, 8, mean=_HALF, std=_HALF),
}  # fmt: skip

UNLISTED = Entry("", 0, size=0, mean=(), std=(), label_column=None)  # of a path or a hub id
