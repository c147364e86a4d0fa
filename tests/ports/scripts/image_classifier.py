"""A convolutional network on images with random augmentation, by `Trainer`, which keeps the best weights."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep


class Shapes(Dataset):
    """Bright squares in one of four corners, under noise."""

    def __init__(self, length, *, train):
        generator = torch.Generator().manual_seed(int(train))
        self.labels = torch.randint(4, (length,), generator=generator)
        self.images = torch.randn(length, 3, 12, 12, generator=generator)
        for image, label in zip(self.images, self.labels.tolist(), strict=True):
            row, column = 6 * (label // 2), 6 * (label % 2)
            image[:, row : row + 6, column : column + 6] += 1.0
        self.train = train

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.train:
            image = image + 0.1 * torch.randn_like(image)
            if torch.rand(()) < 0.5:
                image = image * (0.8 + 0.4 * torch.rand(()))
        return image, self.labels[index]


def make_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(3),  # adaptive pooling to more than one pixel has no deterministic backward pass on a GPU
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64, 4),
    )


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)


def accuracy(model, batch):
    images, labels = batch
    return {"accuracy": ((model(images).argmax(1) == labels).sum(), len(labels))}


def main(world):
    torch.manual_seed(0)
    model = make_model()
    trainer = lockstep.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4),
        loss,
        accuracy,
        schedule=lockstep.Schedule.cosine(warmup="2 steps"),
        callbacks=[lockstep.SaveBest("accuracy", "max")],
        folder="runs/image_classifier",
    )
    train = DataLoader(Shapes(200, train=True), batch_size=64, shuffle=True, drop_last=True)
    test = DataLoader(Shapes(70, train=False), batch_size=32)
    history = trainer.train(train, test, epochs=4, checkpoints=lockstep.CheckpointPolicy(every=2))
    if world.is_main:
        print(history[-1])


if __name__ == "__main__":
    lockstep.launch(main)
